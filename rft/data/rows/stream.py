"""Rows that are read when they are drawn: only a buffer of rows is in memory, whatever the size of the data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft.batch.counter_rng import generator
from rft.data.rows.base import RowFilter, StreamedRows
from rft.data.rows.lazy import Row, Rows
from rft.data.sampler import RowSampler

ShardReader = Callable[[int], Iterator[Row]]  # (index of the first row) -> rows of a file or a shard
PREVIEW = 64  # rows that are read before a model is loaded


class StreamPosition(NamedTuple):
    """A position in a stream: the epoch, the index of the shard in the epoch's order, and the row in the shard."""

    epoch: int
    shard: int
    row: int


@dataclass(eq=False, repr=False)
class RowStream(StreamedRows):
    """Streams the rows of files or shards in endless epochs. Each block of `buffer` rows is shuffled.

    With a buffer above 1, the order of the shards is shuffled in every epoch, too. The last block of an epoch may be
    smaller, so that every epoch has every row once. The order depends only on the seed and the buffer, and every rank
    reads all rows.

    Attributes:
        position: rows drawn so far, including dropped ones.

    Args:
        shards: one or more.
        key: the yaml key of the rows.
        buffer: rows in a block; 1 disables shuffling.
        filters: a row stays if all of them keep it.
        log: shows a message to the user: how many rows are dropped.
    """

    shards: Sequence[ShardReader]
    key: str
    buffer: int = 1
    filters: Sequence[RowFilter] = ()
    log: Callable[[str], None] = lambda message: None

    def __post_init__(self) -> None:
        super().__init__()
        self.position = 0
        self._dropped = 0
        self._kept_any = False  # whether a row of this epoch was not dropped
        self._block: list[Row] = []
        self._taken = 0  # rows of the block that have been drawn

    def sampler(self, seed: int, shuffle: bool) -> "StreamSampler":
        return StreamSampler(self, seed, shuffle)

    def preview(self) -> Rows:
        rows = list(islice(chain.from_iterable(shard(0) for shard in self.shards), PREVIEW))
        if not rows:
            raise ValueError(f"{self.key}: the data holds no rows")
        return rows

    def open(self, buffer: int, filters: Sequence[RowFilter], log: Callable[[str], None]) -> "RowStream":
        return RowStream(self.shards, self.key, buffer, filters, log)

    def start(self, seed: int, shuffle: bool) -> None:
        """Starts the first epoch.

        Args:
            seed: determines every order.
            shuffle: `data.shuffle`; false: shards and rows stay in their own order.
        """
        self._seed = seed
        self._shuffle = shuffle and self.buffer > 1
        self._next = self._begin = StreamPosition(0, 0, 0)  # first positions of the next block and of this one
        self._reading = self._read(self._next)

    def take(self, number: int) -> list[int]:
        """Draws rows and returns their positions; the rows can be indexed until the next call.

        Raises:
            ValueError: a row is malformed, or all rows of an epoch were dropped.
        """
        self.drawn = {}
        while len(self.drawn) < number:
            if self._taken == len(self._block):
                self._fill()
            rows = self._block[self._taken : self._taken + number - len(self.drawn)]
            fits = self._fits(rows)
            self.drawn |= {self.position + index: row for index, row in enumerate(rows) if fits[index]}
            self._kept_any |= any(fits)
            self._dropped += fits.count(False)
            self._taken += len(rows)
            self.position += len(rows)
        return list(self.drawn)

    @property
    def _why(self) -> str:
        return ", or ".join(row_filter.why for row_filter in self.filters)

    def _fits(self, rows: list[Row]) -> list[bool]:
        """For each row, whether all filters keep it; a filter reads what those before it keep."""
        fits = [True] * len(rows)
        for row_filter in self.filters:
            left = [number for number, fit in enumerate(fits) if fit]
            for number, keeps in zip(left, row_filter.keeps([rows[number] for number in left]), strict=True):
                fits[number] = keeps
        return fits

    def _fill(self) -> None:
        """Reads the next block."""
        if self._dropped:
            self.log(f"{self.key}: {self._dropped:,} of {self.position:,} rows so far were dropped: {self._why}")
        block = list(islice(self._reading, self.buffer))
        if not block:
            if not self._kept_any:
                raise ValueError(f"{self.key}: all rows of an epoch were dropped: {self._why}; raise the limit")
            self._kept_any = False
            self._next = StreamPosition(self._next.epoch + 1, 0, 0)
            self._reading = self._read(self._next)
            block = list(islice(self._reading, self.buffer))
        self._block = [block[index][1] for index in self._order(len(block), self.position)]
        self._begin, self._next, self._taken = self._next, block[-1][0], 0

    def _read(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, Row]]:
        """The rows of an epoch from a position on, each with the position that follows it."""
        first = start.row
        order = self._order(len(self.shards), -1 - start.epoch)
        for shard in range(start.shard, len(self.shards)):
            for number, row in enumerate(self.shards[order[shard]](first), first + 1):
                yield StreamPosition(start.epoch, shard, number), row
            first = 0

    def _order(self, count: int, number: int) -> Sequence[int]:
        """The order of shards or of the rows of a block; `number` is another one for each of them."""
        if not self._shuffle:
            return range(count)
        order: list[int] = torch.randperm(count, generator=generator(self._seed, number)).tolist()
        return order

    def state_dict(self) -> dict[str, Any]:
        """The position at which the current block begins, and how many of its rows have been drawn."""
        state = {"position": self.position, "begun": tuple(self._begin), "taken": self._taken}
        return state | {"dropped": self._dropped, "fruitful": self._kept_any}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of `state_dict`: reads the block again."""
        self.position = state["position"] - state["taken"]
        self._next = StreamPosition(*state["begun"])
        self._reading = self._read(self._next)
        self._dropped, self._kept_any = 0, True
        self._fill()
        self._dropped, self._kept_any = state["dropped"], state["fruitful"]
        self.position = state["position"]
        self._taken = state["taken"]


class StreamSampler(RowSampler):
    """Draws the rows of a stream in its order; no other sampler may use it. Rows have no weights."""

    _rows: RowStream

    def __init__(self, rows: RowStream, seed: int, shuffle: bool) -> None:
        super().__init__(rows, seed, shuffle)
        rows.start(seed, shuffle)

    def take(self, number: int, weights: Tensor | None = None) -> list[tuple[int, int]]:
        """Raises a ValueError if a row is malformed, or all rows of an epoch were dropped."""
        assert weights is None, "rows of a stream have no weights"
        positions = self._rows.take(number)
        self.position = self._rows.position
        return [(position, position) for position in positions]

    def state_dict(self) -> dict[str, Any]:
        """The position, and the state of the stream."""
        return {"position": self.position} | self._rows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of `state_dict`."""
        self._rows.load_state_dict(state)
        self.position = state["position"]
