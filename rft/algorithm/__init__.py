"""Pure math on columns: no I/O, no model, no process group. Importing this package registers every plugin in it."""

from rft.algorithm import aggregation, control, gradient_mask, kl, shaping
from rft.algorithm.advantage import group, process, returns, solved, tracker
from rft.algorithm.loss import (
    clip,
    implicit_reward,
    nll,
    preference,
    reward_model,
    selected,
    sequence,
    soft,
    terms,
    trust,
    value,
)
from rft.algorithm.registries import ADVANTAGES, AGGREGATIONS, CONTROLS, GRADIENT_MASKS, LOSSES, SHAPINGS

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CONTROLS",
    "GRADIENT_MASKS",
    "LOSSES",
    "SHAPINGS",
    "aggregation",
    "clip",
    "control",
    "gradient_mask",
    "group",
    "implicit_reward",
    "kl",
    "nll",
    "preference",
    "process",
    "returns",
    "reward_model",
    "selected",
    "sequence",
    "shaping",
    "soft",
    "solved",
    "terms",
    "tracker",
    "trust",
    "value",
]
