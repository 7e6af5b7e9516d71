"""Pure math on columns: no I/O, no model, no process group. Importing this package registers every plugin in it."""

from rft.algorithm import objective
from rft.algorithm.registries import (
    ADVANTAGES,
    AGGREGATIONS,
    CONTROLS,
    GRADIENT_MASKS,
    LOSSES,
    SELECTIONS,
    SHAPINGS,
)
from rft.imports import import_all

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CONTROLS",
    "GRADIENT_MASKS",
    "LOSSES",
    "SELECTIONS",
    "SHAPINGS",
    "objective",
]

for folder in ("advantage", "loss", "scores", "token_weights"):
    import_all(f"{__name__}.{folder}")
