"""Rows that are read as they are drawn: of data of any size, only a buffer of rows is in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from rft.batch.counter_rng import generator
from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Row, Rows
from rft.registry import Target

ShardReader = Callable[[int], Iterator[Row]]  # the rows of a file or a shard, from the one of that number on
PREVIEW = 64  # rows that are read before a model is loaded


class StreamedRows(Sequence[Row]):
    """Rows of a stream by their positions. Only the rows that were drawn last are there.

    Attributes:
        drawn: those rows. The sampler that draws them sets it.
    """

    def __init__(self) -> None:
        self.drawn: dict[int, Row] = {}

    @abstractmethod
    def preview(self) -> Rows:
        """The first rows, for checks before a model is loaded.

        Raises:
            ValueError: there are none, or one of them is wrong.
        """

    @abstractmethod
    def open(self, buffer: int, encoder: Encoder, most: int | None, say: Callable[[str], None]) -> "StreamedRows":
        """The same rows for one sampler, from the first one on; for the arguments see `RowStream`."""

    def __len__(self) -> int:
        raise ValueError(
            "data.streaming: the number of rows must be known to draw them like this; set data.streaming=null"
        )

    def __getitem__(self, position: Any) -> Any:
        return self.drawn[position]


class StreamableRows(ABC):
    """A class of rows that can be read as they are drawn."""

    @abstractmethod
    def stream(self, required: Sequence[str]) -> StreamedRows:
        """The rows. Raises what `load` raises; an error in a row is raised when the row is read.

        Args:
            required: fields that every row must have, not null.
        """


def check_stream(buffer: int | None, train: Target) -> None:
    """Raises a ValueError if the rows cannot be streamed."""
    if buffer is None:
        return
    check_streamable(train)


def check_streamable(rows: Target) -> None:
    """Raises a ValueError if a class of rows cannot be streamed."""
    if not issubclass(rows.factory, StreamableRows):
        raise ValueError(
            f"data.streaming: {rows.key} is a {rows.factory.__name__}, which knows all its rows at once; set "
            "data.streaming=null"
        )


def check_room(buffer: int, most: int | None, context: int, new_tokens: int) -> None:
    """Raises a ValueError if a prompt of the stream may leave no room for an answer in the model's context."""
    if most is None or most + new_tokens > context:
        raise ValueError(
            f"data.streaming={buffer}: prompts that leave no room for an answer cannot be dropped beforehand; set "
            f"data.max_prompt_tokens to {context - new_tokens} or less (the model's context of {context} without "
            f"rollout.max_new_tokens={new_tokens}), which drops them when they are read"
        )


class StreamPosition(NamedTuple):
    """A place in a stream: an epoch, the shard by its place in the order of the epoch, and the row of that shard."""

    epoch: int
    shard: int
    row: int


class RowStream(StreamedRows):
    """The rows of files or shards, epoch after epoch, in blocks of a buffer. The rows of a block are shuffled.

    Every epoch has the shards in an order of its own. A block ends with its epoch, so every epoch has every row once.
    The order depends on the seed and the buffer alone, and every rank reads all rows.

    Attributes:
        position: rows so far, with those that were dropped.

    Args:
        shards: one or more.
        key: of the rows in the yaml.
        buffer: rows of a block; 1 leaves rows and shards in their order.
        encoder: of prompts; needed where `most` is given.
        most: tokens of a prompt; rows with longer ones are dropped. None keeps all rows.
        say: receives messages for people: how many rows are dropped.
    """

    def __init__(
        self,
        shards: Sequence[ShardReader],
        key: str,
        buffer: int = 1,
        encoder: Encoder | None = None,
        most: int | None = None,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        super().__init__()
        self.shards = shards
        self.position = 0
        self._key = key
        self._buffer = buffer
        self._encoder = encoder
        self._most = most
        self._say = say
        self._dropped = 0
        self._kept_any = False  # whether this epoch has had a row that was not dropped
        self._block: list[Row] = []
        self._taken = 0  # of the block

    def preview(self) -> Rows:
        rows = list(islice(chain.from_iterable(shard(0) for shard in self.shards), PREVIEW))
        if not rows:
            raise ValueError(f"{self._key}: the data holds no rows")
        return rows

    def open(self, buffer: int, encoder: Encoder, most: int | None, say: Callable[[str], None]) -> "RowStream":
        return RowStream(self.shards, self._key, buffer, encoder, most, say)

    def start(self, seed: int) -> None:
        """Begins the first epoch. The seed changes every order."""
        self._seed = seed
        self._next = self._begin = StreamPosition(0, 0, 0)  # of the next block, and of this one
        self._reading = self._read(self._next)

    def take(self, number: int) -> list[int]:
        """Draws rows and returns their positions; the stream has the rows until the next call.

        Raises:
            ValueError: a row is wrong, or all rows of an epoch were dropped.
        """
        self.drawn = {}
        while len(self.drawn) < number:
            if self._taken == len(self._block):
                self._fill()
            rows = self._block[self._taken : self._taken + number - len(self.drawn)]
            fits = self._fits(rows)
            self.drawn |= {self.position + place: row for place, row in enumerate(rows) if fits[place]}
            self._kept_any |= any(fits)
            self._dropped += fits.count(False)
            self._taken += len(rows)
            self.position += len(rows)
        return list(self.drawn)

    def _fits(self, rows: list[Row]) -> list[bool]:
        """Which of some rows are not dropped."""
        if self._most is None:
            return [True] * len(rows)
        assert self._encoder is not None, "an encoder counts the tokens of prompts"
        return [len(prompt) <= self._most for prompt in self._encoder.prompts(rows)]

    def _fill(self) -> None:
        """Reads the next block."""
        if self._dropped:
            self._say(
                f"{self._key}: {self._dropped:,} of {self.position:,} rows so far had prompts of more tokens than "
                f"data.max_prompt_tokens={self._most}. They were dropped"
            )
        found = list(islice(self._reading, self._buffer))
        if not found:
            if not self._kept_any:
                raise ValueError(
                    f"{self._key}: no prompt of an epoch is as short as data.max_prompt_tokens={self._most}; raise it"
                )
            self._kept_any = False
            self._next = StreamPosition(self._next.epoch + 1, 0, 0)
            self._reading = self._read(self._next)
            found = list(islice(self._reading, self._buffer))
        order = torch.randperm(len(found), generator=generator(self._seed, self.position)).tolist()
        self._block = [found[place][1] for place in order]
        self._begin, self._next, self._taken = self._next, found[-1][0], 0

    def _read(self, start: StreamPosition) -> Iterator[tuple[StreamPosition, Row]]:
        """The rows of an epoch from a place on, each with the place behind it."""
        first = start.row
        shuffled = torch.randperm(len(self.shards), generator=generator(self._seed, -1 - start.epoch)).tolist()
        order = shuffled if self._buffer > 1 else range(len(self.shards))
        for place in range(start.shard, len(self.shards)):
            for number, row in enumerate(self.shards[order[place]](first), first + 1):
                yield StreamPosition(start.epoch, place, number), row
            first = 0

    def state_dict(self) -> dict[str, Any]:
        """The place where the current block begins, and how many of its rows are taken."""
        known = {"position": self.position, "begun": tuple(self._begin), "taken": self._taken}
        return known | {"dropped": self._dropped, "fruitful": self._kept_any}

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
