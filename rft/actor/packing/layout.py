"""How the rows of a micro-batch lie in one forward: behind one another without padding, what a group shares once."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.batch.columns import lengths
from rft.batch.media import media_entries

if TYPE_CHECKING:
    from rft.actor.packing.sequence_shard import SequenceShard


@dataclass(frozen=True)
class PackedSegment:
    """Rows of one length behind one another. Each sees itself causally, and all of the segment that they begin with.

    Attributes:
        rows: how many.
        length: tokens of each, at least one.
        prefix: the number of the segment that they begin with, which is of one row and comes before, or None.
    """

    rows: int
    length: int
    prefix: int | None = None


@dataclass(frozen=True)
class PackedLayout:
    """B rows of at most T tokens as one sequence of N.

    Attributes:
        source: (N,) where each packed token stands in the flattened (B * T) rows.
        place: (B, T) where each token of a row lies among the packed ones; 0 for padding.
        positions: (N,) the place of each packed token in its row.
        segments: what the sequence is made of, in order.
        slice: where several ranks have joined their rows into the sequence of `segments`: the part of this one.
    """

    source: Tensor
    place: Tensor
    positions: Tensor
    segments: tuple[PackedSegment, ...]
    slice: "SequenceShard | None" = None

    def to(self, device: torch.device) -> "PackedLayout":
        """The same on a device."""
        moved = {name: vars(self)[name].to(device) for name in ("source", "place", "positions")}
        return replace(self, slice=self.slice and self.slice.to(device), **moved)


def shared_prefixes(batch: TensorDict) -> Tensor:
    """How many first tokens each row has in common with all other rows of its group, (B,) int64.

    A row keeps at least one token of its own. A group of one shares nothing, and neither does a group whose rows have
    media: equal tokens may stand for different media.
    """
    shared = torch.zeros(len(batch), dtype=torch.int64)
    length, columns, media = lengths(batch), list(batch["tokens"].values()), media_entries(batch)
    for group in batch["group"].unique():
        rows = (batch["group"] == group).nonzero()[:, 0]
        if len(rows) > 1 and not any(len(media[row].keys()) for row in rows.tolist() if media):
            room = int(length[rows].min()) - 1
            equal = torch.stack([(column[rows, :room] == column[rows[:1], :room]).all(0) for column in columns])
            shared[rows] = equal.all(0).long().cumprod(0).sum()
    return shared


def pack_layout(batch: TensorDict, shared: Tensor) -> PackedLayout:
    """Lays rows behind one another; of rows of one group that are here together, the shared tokens lie there once.

    Args:
        batch: B rows.
        shared: (B,) first tokens that a row has in common with the others of its group, the same for all of them.
    """
    length, group, common = lengths(batch).tolist(), batch["group"].tolist(), shared.tolist()
    here, width = Counter(group), batch["response_mask"].shape[1]
    place = torch.zeros(len(batch), width, dtype=torch.int64)
    source: list[Tensor] = []
    segments: list[PackedSegment] = []
    end = 0

    def append(row: int, first: int, last: int) -> None:
        nonlocal end
        place[row, first:last] = torch.arange(end, end + last - first)
        source.append(torch.arange(row * width + first, row * width + last))
        end += last - first

    def append_rows(rows: list[int], first: int, prefix: int | None) -> None:
        for size, alike in groupby(sorted(rows, key=lambda row: length[row]), key=lambda row: length[row]):
            equal = list(alike)
            segments.append(PackedSegment(len(equal), size - first, prefix))
            for row in equal:
                append(row, first, size)

    sharing: dict[int, list[int]] = {}
    for row in range(len(batch)):
        if common[row] > 0 and here[group[row]] > 1:
            sharing.setdefault(group[row], []).append(row)
    alone = set(range(len(batch))).difference(*sharing.values())
    append_rows(sorted(alone), 0, None)
    for rows in sharing.values():
        size = common[rows[0]]
        segments.append(PackedSegment(1, size))
        append(rows[0], 0, size)
        place[rows, :size] = place[rows[0], :size]
        append_rows(rows, size, len(segments) - 1)
    everything = torch.cat(source)
    return PackedLayout(everything, place, everything % width, tuple(segments))
