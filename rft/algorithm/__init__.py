"""Pure math on columns: no I/O, no model, no process group. Importing this package registers every plugin in it."""

from rft.algorithm import control, kl
from rft.algorithm.advantage import group, process, returns, solved, teacher, tracker, turns, win_rate
from rft.algorithm.loss import (
    clip,
    distill,
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
from rft.algorithm.registries import (
    ADVANTAGES,
    AGGREGATIONS,
    CONTROLS,
    GRADIENT_MASKS,
    LOSSES,
    SELECTIONS,
    SHAPINGS,
)
from rft.algorithm.scores import normalization, selection, shaping
from rft.algorithm.token_weights import aggregation, gradient_mask

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CONTROLS",
    "GRADIENT_MASKS",
    "LOSSES",
    "SELECTIONS",
    "SHAPINGS",
    "aggregation",
    "clip",
    "control",
    "distill",
    "gradient_mask",
    "group",
    "kl",
    "nll",
    "normalization",
    "preference",
    "process",
    "returns",
    "reward_model",
    "selected",
    "selection",
    "sequence",
    "shaping",
    "soft",
    "solved",
    "teacher",
    "terms",
    "tracker",
    "trust",
    "turns",
    "value",
    "win_rate",
]
