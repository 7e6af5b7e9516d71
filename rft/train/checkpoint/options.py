"""The options of checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rft.logger.history import rank_key
from rft.ranges import NonNegativeInt, PositiveInt
from rft.strategy.base import DTYPES
from rft.train.checkpoint.names import step_of


@dataclass
class CheckpointOptions:
    """When to save and what to keep.

    Attributes:
        every: steps between checkpoints; 0 for the ends of stages alone.
        keep_last: number of newest checkpoints that stay; those that only a stop has written do not count.
        keep_best: number of best checkpoints, by the watched metric, that stay besides.
        keep_every: checkpoints whose step is a multiple of this stay besides; 0 for none.
        export_every: of the checkpoints that are `every` steps apart, every so many have the model in `actor/`, and so
            has the last one of a stage; 1 for all checkpoints.
        fallback: folder to which the last checkpoint is written where it cannot be written to the run; None: nowhere.
        export_dtype: of the weights in `actor/`; `auto`: that of the files that they were loaded from.
    """

    every: NonNegativeInt
    keep_last: PositiveInt
    keep_best: NonNegativeInt
    keep_every: NonNegativeInt
    export_every: PositiveInt
    fallback: str | None
    export_dtype: Literal["auto", "float32", "bfloat16", "float16"]

    def dtype(self) -> torch.dtype | None:
        """The dtype that `export_dtype` names; None for `auto`."""
        return DTYPES.get(self.export_dtype)

    def kept(self, manifests: Mapping[Path, Mapping[str, Any]], watched: str) -> set[Path]:
        """The checkpoints that stay, among them the newest.

        Args:
            manifests: of all checkpoints by their folders, oldest first.
            watched: the metric that makes a checkpoint the best; see `rank_key`.
        """
        steps = list(manifests)
        regular = [path for path in steps if not manifests[path].get("extra", False)]
        metrics = {path: found["metric"] for path, found in manifests.items() if found["metric"] is not None}
        measured = sorted(metrics, key=lambda path: (rank_key(watched, metrics[path]), path.name))
        best = measured[max(0, len(measured) - self.keep_best) :]
        multiples = [path for path in steps if self.keep_every > 0 and step_of(path) % self.keep_every == 0]
        return {*steps[-1:], *regular[-max(1, self.keep_last) :], *best, *multiples}
