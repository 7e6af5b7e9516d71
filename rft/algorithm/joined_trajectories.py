"""The rows of each trajectory joined into one row, where a trajectory has several."""

from copy import copy
from functools import cached_property

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.trajectories import Trajectories
from rft.batch.columns import kind_of
from rft.batch.device import to_device


class JoinedTrajectories(Trajectories):
    """Joins the rows of N trajectories.

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
        if column.dim() == 1:
            return column[self.last]
        joined = column.new_zeros(len(self.last), self._joined_width, *column.shape[2:])
        return joined.index_put(self._to, column[self._from])

    def split(self, column: Tensor) -> Tensor:
        if column.dim() == 1:
            return column[self.owner]
        rows = column.new_zeros(len(self.owner), self._width, *column.shape[2:])
        return rows.index_put(self._from, column[self._to])

    def of_copy(self, batch: TensorDict) -> "JoinedTrajectories":
        device, moved = batch["turn"].device, copy(self)
        moved._batch = batch
        moved.owner, moved.last = to_device(self.owner, device), to_device(self.last, device)
        moved._from, moved._to = (
            (to_device(row, device), to_device(column, device)) for row, column in (self._from, self._to)
        )
        return moved

    @property
    def is_last(self) -> Tensor:
        return torch.zeros_like(self.owner, dtype=torch.bool).index_fill(0, self.last, True)

    @cached_property
    def rows(self) -> TensorDict:
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
