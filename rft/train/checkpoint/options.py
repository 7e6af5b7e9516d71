"""The options of checkpoints."""

from dataclasses import dataclass
from typing import Literal

import torch

from rft.ranges import NonNegativeInt, PositiveInt
from rft.strategy.base import DTYPES


@dataclass
class CheckpointOptions:
    """When to save and what to keep.

    Attributes:
        every: steps between checkpoints; 0 for the ends of stages alone.
        keep_last: number of newest checkpoints that stay.
        keep_best: number of best checkpoints, by the watched metric, that stay besides.
        keep_every: checkpoints whose step is a multiple of this stay besides; 0 for none.
        export_every: of the checkpoints that are `every` steps apart, every so many have the model in `actor/`, and so
            has the last one of a stage; 1 for all checkpoints.
        export_dtype: of the weights in `actor/`; `auto`: that of the files that they were loaded from.
    """

    every: NonNegativeInt
    keep_last: PositiveInt
    keep_best: NonNegativeInt
    keep_every: NonNegativeInt
    export_every: PositiveInt
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"]

    def dtype(self) -> torch.dtype | None:
        """The dtype that `export_dtype` names; None for `auto`."""
        return DTYPES.get(self.export_dtype)
