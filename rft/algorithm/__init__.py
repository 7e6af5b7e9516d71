"""Pure math on columns: no I/O, no model, no process group. Importing this package registers every plugin in it."""

from rft.algorithm import aggregation, kl, shaping
from rft.algorithm.advantage import group, returns
from rft.algorithm.loss import clip, nll, terms, value
from rft.algorithm.registries import ADVANTAGES, AGGREGATIONS, KL_CONTROLS, LOSSES, SHAPINGS

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "KL_CONTROLS",
    "LOSSES",
    "SHAPINGS",
    "aggregation",
    "clip",
    "group",
    "kl",
    "nll",
    "returns",
    "shaping",
    "terms",
    "value",
]
