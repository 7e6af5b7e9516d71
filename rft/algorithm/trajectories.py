"""Trajectories of several rows: dialogues that were cut, compacted, branched, or written as a row per turn.

Such rows have one number in the column `trajectory`, and each token trains in one of them. Everything that counts rows,
compares them or runs over their tokens is meant for whole trajectories: the functions of an algorithm are called with
the rows of a trajectory joined into one row, and what they write is split over the rows again.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import cached_property

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.batch.columns import kind_of
from rft.batch.device import to_device


class Trajectories:
    """N trajectories, and where the tokens of their rows are in joined rows.

    A joined row has the tokens of `response_mask` and of `observation_mask` in the order of their turns, from column 1
    on: nothing predicts column 0. The context, which may stand in several rows, is left out.

    Args:
        batch: B rows in any order, with `trajectory`, `turn` and `response_mask`.

    Attributes:
        owner: (B,) the trajectory of each row, from 0 on.
        last: (N,) the row of each trajectory that has its last turn.
    """

    def __init__(self, batch: TensorDict) -> None:
        self._batch = batch
        here, turn = batch["response_mask"].clone(), batch["turn"]
        if "observation_mask" in batch.keys():
            here |= batch["observation_mask"]
        here[:, 0] = False
        ids, self.owner, rows = torch.unique(batch["trajectory"], return_inverse=True, return_counts=True)
        self.last = self._ordered(self.owner, turn.amax(1))[rows.cumsum(0) - 1]
        row, column = here.nonzero(as_tuple=True)
        order = self._ordered(self.owner[row], turn[row, column])
        self._from = row[order], column[order]
        trajectory = self.owner[row[order]]
        tokens = trajectory.bincount(minlength=len(ids))  # (N,)
        starts = tokens.cumsum(0) - tokens
        self._to = trajectory, torch.arange(len(order), device=order.device) - starts[trajectory] + 1
        self._width, self._joined_width = here.shape[1], 1 + int(tokens.max())

    @staticmethod
    def _ordered(trajectory: Tensor, turn: Tensor) -> Tensor:
        """The places that sort by the trajectory, then by the turn."""
        order = turn.argsort(stable=True)
        return order[trajectory[order].argsort(stable=True)]

    def join(self, column: Tensor) -> Tensor:
        """A column of the rows, (B,), (B, T) or (B, T, K), as that of the joined rows. Differentiable.

        A number a row is taken from the row of the last turn.
        """
        if column.dim() == 1:
            return column[self.last]
        joined = column.new_zeros(len(self.last), self._joined_width, *column.shape[2:])
        return joined.index_put(self._to, column[self._from])

    def split(self, column: Tensor) -> Tensor:
        """A column of the joined rows as that of the rows: a token's number at its token, a row's in all its rows."""
        if column.dim() == 1:
            return column[self.owner]
        rows = column.new_zeros(len(self.owner), self._width, *column.shape[2:])
        return rows.index_put(self._from, column[self._to])

    def of_copy(self, batch: TensorDict) -> "Trajectories":
        """The same trajectories, of a copy of the batch on another device."""
        device, moved = batch["turn"].device, copy(self)
        moved._batch = batch
        moved.owner, moved.last = to_device(self.owner, device), to_device(self.last, device)
        moved._from, moved._to = (
            (to_device(row, device), to_device(column, device)) for row, column in (self._from, self._to)
        )
        return moved

    @property
    def is_last(self) -> Tensor:
        """The rows of the last turns, one a trajectory, (B,) bool."""
        return torch.zeros_like(self.owner, dtype=torch.bool).index_fill(0, self.last, True)

    @cached_property
    def rows(self) -> TensorDict:
        """The joined rows. A trajectory is `truncated` if one of its rows is; `media` are left out."""
        batch = self._batch
        joined = batch.exclude("media", *(name for name in batch.keys() if isinstance(batch.get(name), Tensor)))
        joined = joined[self.last]
        for name in batch.keys():
            column = batch.get(name)
            if isinstance(column, Tensor):
                joined[name] = self.join(column)
            elif kind_of(name, 2) == "token":
                joined[name] = TensorDict({leaf: self.join(part) for leaf, part in column.items()}, joined.batch_size)
        truncated = torch.zeros_like(self.last).index_add(0, self.owner, batch["truncated"].long())
        joined["truncated"] = truncated > 0
        return joined


def trajectories_of(batch: TensorDict) -> Trajectories | None:
    """The trajectories of a batch; None where each of them is one row."""
    if "trajectory" not in batch.keys() or len(batch["trajectory"].unique()) == len(batch):
        return None
    return Trajectories(batch)


@contextmanager
def joined_rows(
    batch: TensorDict, outputs: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[TensorDict, dict[str, Tensor]]]:
    """The rows of each trajectory as one; the columns that are written there are split over the rows at the end.

    Where no trajectory has several rows, they are the rows themselves.

    Args:
        batch: of whole trajectories.
        outputs: of a model for the rows, which are joined, too.
    """
    outputs, trajectories = dict(outputs or {}), trajectories_of(batch)
    if trajectories is None:
        yield batch, outputs
        return
    rows = trajectories.rows
    before = {name: rows.get(name) for name in rows.keys()}
    yield rows, {name: trajectories.join(column) for name, column in outputs.items()}
    for name in rows.keys():
        column = rows.get(name)
        if isinstance(column, Tensor) and column is not before.get(name):
            batch[name] = trajectories.split(column)
