"""The layout of packed rows in one forward: behind one another, without padding, a shared prefix once per group.

With context parallelism several ranks have one packed sequence, see `sequence_shard.py`.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.batch.columns import lengths
from rft.batch.device import to_device
from rft.batch.media import media_entries


@dataclass(frozen=True)
class PackedSegment:
    """Rows of one length behind one another. A row attends to itself causally, and to all of its prefix.

    Attributes:
        rows: number of rows.
        length: tokens of each row, at least one.
        prefix: the number of an earlier segment of one row with the tokens that these rows begin with, or None.
    """

    rows: int
    length: int
    prefix: int | None = None


Segments = tuple[PackedSegment, ...]  # of a packed sequence, in order


class PackedLayout:
    """B rows of at most T tokens as one sequence of N tokens. It does not change.

    No dataclass: FSDP would copy it before every block, field by field, and make the table again each time.

    Attributes:
        source: (N,) index of each packed token in the flattened (B * T) rows.
        place: (B, T) index of each token of a row among the packed tokens; 0 for padding.
        positions: (N,) position of each packed token in its row.
        segments: of the sequence, in order.
        shard: this rank's `SequenceShard`, where several ranks have joined their rows into that of `segments`.
        table: `segment_table` of the segments.
    """

    def __init__(
        self,
        source: Tensor,
        place: Tensor,
        positions: Tensor,
        segments: Segments,
        shard: Any = None,
    ) -> None:
        self.source = source
        self.place = place
        self.positions = positions
        self.segments = segments
        self.shard = shard
        self.table = segment_table(segments)

    def to(self, device: torch.device) -> "PackedLayout":
        """The same on a device."""
        source, place, positions = (to_device(tensor, device) for tensor in (self.source, self.place, self.positions))
        return PackedLayout(source, place, positions, self.segments, self.shard and self.shard.to(device))


def segment_table(segments: Segments) -> Tensor:
    """Segments as a tensor (3 S,) int64 in host memory: rows, length, and prefix or -1 of each.

    The compiler compiles again for other Python values, and not for another tensor.
    """
    return torch.tensor([n for s in segments for n in (s.rows, s.length, -1 if s.prefix is None else s.prefix)])


def table_segments(table: Tensor) -> Segments:
    """The segments of a `segment_table`."""
    numbers = table.view(-1, 3).tolist()
    return tuple(PackedSegment(rows, length, None if prefix < 0 else prefix) for rows, length, prefix in numbers)


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
    """Packs rows behind one another; the shared tokens of a group are there once where several of its rows are.

    Args:
        batch: B rows.
        shared: (B,) first tokens that a row has in common with the others of its group, equal within the group.
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


def shard_queries(tokens: TensorDict, chosen: Tensor, candidates: Tensor | None) -> Tensor:
    """The chosen tokens (Q,), or (Q, 1 + K) with their candidates behind them, whose logits are computed.

    Args:
        tokens: columns (B, T).
        chosen: (Q,) places of the chosen tokens among the flattened (B, T - 1) from the second one of each row on.
        candidates: (B, T, K) token ids, or None.
    """
    targets = tokens["input_ids"][:, 1:].flatten()[chosen]
    if candidates is None:
        return targets
    return torch.cat([targets[:, None], candidates[:, 1:].flatten(0, 1)[chosen].to(targets.dtype)], 1)
