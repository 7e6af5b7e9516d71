"""How the rows of a micro-batch lie in one forward: behind one another without padding, what a group shares once."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.batch import lengths

if TYPE_CHECKING:
    from rft.actor.slices import Slice


@dataclass(frozen=True)
class Segment:
    """A run of packed tokens. It sees itself causally, and all of the segment that its rows begin with.

    Attributes:
        length: tokens, at least one.
        prefix: the number of the segment before it, or None.
    """

    length: int
    prefix: int | None


@dataclass(frozen=True)
class Layout:
    """B rows of at most T tokens as one sequence of N.

    Attributes:
        source: (N,) where each packed token stands in the flattened (B * T) rows.
        place: (B, T) where each token of a row lies among the packed ones; 0 for padding.
        positions: (N,) the place of each packed token in its row.
        segments: the runs in the order of the sequence.
        slice: where several ranks have joined their rows into the sequence of `segments`: the part of this one.
    """

    source: Tensor
    place: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    slice: "Slice | None" = None

    def to(self, device: torch.device) -> "Layout":
        """The same on a device."""
        moved = {name: vars(self)[name].to(device) for name in ("source", "place", "positions")}
        return replace(self, slice=self.slice and self.slice.to(device), **moved)


def shared_prefixes(batch: TensorDict) -> Tensor:
    """How many first tokens each row has in common with all other rows of its group, (B,) int64.

    A row keeps at least one token of its own. A group of one shares nothing.
    """
    shared = torch.zeros(len(batch), dtype=torch.int64)
    length, columns = lengths(batch), list(batch["tokens"].values())
    for group in batch["group"].unique():
        rows = (batch["group"] == group).nonzero()[:, 0]
        if len(rows) > 1:
            room = int(length[rows].min()) - 1
            equal = torch.stack([(column[rows, :room] == column[rows[:1], :room]).all(0) for column in columns])
            shared[rows] = equal.all(0).long().cumprod(0).sum()
    return shared


def pack(batch: TensorDict, shared: Tensor) -> Layout:
    """Lays rows behind one another; of rows of one group that are here together, the shared tokens lie there once.

    Args:
        batch: B rows.
        shared: (B,) first tokens that a row has in common with the others of its group, the same for all of them.
    """
    length, group = lengths(batch).tolist(), batch["group"].tolist()
    width = batch["response_mask"].shape[1]
    place = torch.zeros(len(batch), width, dtype=torch.int64)
    source: list[Tensor] = []
    segments: list[Segment] = []
    heads: dict[int, tuple[int, int]] = {}  # number and start of the segment that a group begins with
    end = 0

    def append(row: int, first: int, last: int, prefix: int | None) -> int:
        nonlocal end
        start = end
        end += last - first
        place[row, first:last] = torch.arange(start, end)
        source.append(torch.arange(row * width + first, row * width + last))
        segments.append(Segment(last - first, prefix))
        return start

    for row, (own, common) in enumerate(zip(length, shared.tolist(), strict=True)):
        if common == 0 or group.count(group[row]) == 1:
            append(row, 0, own, None)
            continue
        if group[row] not in heads:
            number = len(segments)
            heads[group[row]] = number, append(row, 0, common, None)
        number, start = heads[group[row]]
        place[row, :common] = torch.arange(start, start + common)
        append(row, common, own, number)
    everything = torch.cat(source)
    return Layout(everything, place, everything % width, tuple(segments))
