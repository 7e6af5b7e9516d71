"""Rows that are read as they are drawn: of data of any size, a buffer of rows is in memory and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Row, Rows
from rft.data.sampler import Cursor, generator
from rft.registry import Target

Part = Callable[[int], Iterator[Row]]  # the rows of a file or a shard, from the one of that number on
LOOKED = 64  # rows that are looked at before a model is loaded


class Unread(ABC):
    """Rows that are read as they are drawn."""

    @abstractmethod
    def first(self) -> Rows:
        """The rows that are looked at beforehand.

        Raises:
            ValueError: there are none, or something is wrong with one of them.
        """

    @abstractmethod
    def open(self, buffer: int, encoder: Encoder, most: int | None, say: Callable[[str], None]) -> "Drawn":
        """What is drawn from; see `Stream`."""


class Streams(ABC):
    """A class of rows that can be read as they are drawn."""

    @abstractmethod
    def stream(self, required: Sequence[str]) -> Unread:
        """The rows; raises what `load` raises, what is wrong with a row when that is read.

        Args:
            required: fields that every row must have, not null.
        """


@dataclass
class Shards(Unread):
    """Files or shards.

    Attributes:
        parts: one or more.
        key: of the rows in the yaml.
    """

    parts: Sequence[Part]
    key: str

    def first(self) -> Rows:
        rows = list(islice(chain.from_iterable(part(0) for part in self.parts), LOOKED))
        if not rows:
            raise ValueError(f"{self.key}: the data holds no rows")
        return rows

    def open(self, buffer: int, encoder: Encoder, most: int | None, say: Callable[[str], None]) -> "Stream":
        return Stream(self, buffer, encoder, most, say)


def check_stream(buffer: int | None, train: Target, source: Target) -> None:
    """Raises a ValueError where rows cannot be streamed, or not be drawn by what reads them."""
    if buffer is None:
        return
    cure = "set data.streaming=null"
    if buffer < 1:
        raise ValueError(f"data.streaming={buffer}: rows are shuffled among so many; give at least 1, or {cure}")
    check_streams(train)
    if source.options.get("tracking") is not None:
        raise ValueError(
            f"data.streaming={buffer}: algorithm.source.tracking counts how often each row is solved, and a stream "
            f"does not know its rows; choose algorithm/source=rollout, or {cure}"
        )


def check_streams(rows: Target) -> None:
    """Raises a ValueError where a class of rows cannot read them as they are drawn."""
    if not issubclass(rows.factory, Streams):
        raise ValueError(
            f"data.streaming: {rows.key} is a {rows.factory.__name__}, which knows all its rows at once; set "
            "data.streaming=null"
        )


def check_room(buffer: int, most: int | None, context: int, new_tokens: int) -> None:
    """Raises a ValueError where a row may come whose prompt leaves no room for an answer in the model's context."""
    if most is None or most + new_tokens > context:
        raise ValueError(
            f"data.streaming={buffer}: prompts that leave no room for an answer are not known beforehand; set "
            f"data.max_prompt_tokens to {context - new_tokens} or less (the model's context of {context} without "
            f"rollout.max_new_tokens={new_tokens}), which drops them as they come"
        )


class Drawn(Sequence[Row]):
    """The rows that were drawn last, by their positions. Whoever draws has one of its own."""

    def __init__(self) -> None:
        self.drawn: dict[int, Row] = {}

    def __len__(self) -> int:
        raise ValueError("data.streaming: what draws the rows has to know how many there are; set data.streaming=null")

    def __getitem__(self, position: Any) -> Any:
        return self.drawn[position]


class Stream(Drawn):
    """The rows of files or shards.

    Args:
        shards: the files or shards.
        buffer: rows that are shuffled among each other; 1 leaves them as they come.
        encoder: of prompts.
        most: tokens of a prompt; rows of longer ones are dropped as they come. None for all rows.
        say: for people, who are told how many are dropped.
    """

    def __init__(
        self, shards: Shards, buffer: int, encoder: Encoder, most: int | None, say: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.parts = shards.parts
        self.key = shards.key
        self.buffer = buffer
        self.most = most
        self.say = say
        self._encoder = encoder

    def fits(self, rows: list[Row]) -> list[bool]:
        """Which of some rows are not dropped."""
        if self.most is None:
            return [True] * len(rows)
        return [len(prompt) <= self.most for prompt in self._encoder.prompts(rows)]


class StreamPosition(NamedTuple):
    """Where reading goes on: an epoch, the part that is there in its order, and the row of that."""

    epoch: int
    part: int
    row: int


class StreamCursor(Cursor):
    """Walks through the epochs of a stream, block by block of its buffer; the rows of a block are shuffled.

    Every epoch has the parts in an order of its own. A block ends with its epoch, so every epoch has every row once.
    What comes depends on the seed and the buffer alone, and every rank reads all of it. Positions count dropped rows.

    Args:
        stream: is given the rows that are drawn.
        seed: changes every order.
    """

    def __init__(self, stream: Stream, seed: int) -> None:
        super().__init__(0, seed)
        self._stream = stream
        self._dropped = 0
        self._fruitful = False  # whether this epoch has had a row that was not dropped
        self._at = self._begun = StreamPosition(0, 0, 0)  # of the next block, and of this one
        self._reading = self._read(self._at)
        self._block: list[Row] = []
        self._taken = 0  # of the block

    def take(self, number: int, weights: Tensor | None = None) -> list[tuple[int, int]]:
        """The next (position, position) pairs; the stream has the rows until the next call.

        Raises:
            ValueError: something is wrong with a row, or all rows of an epoch were dropped.
        """
        assert weights is None, "rows that nobody knows have no weights"
        stream = self._stream
        stream.drawn = {}
        while len(stream.drawn) < number:
            if self._taken == len(self._block):
                self._fill()
            rows = self._block[self._taken : self._taken + number - len(stream.drawn)]
            fits = stream.fits(rows)
            stream.drawn |= {self.position + place: row for place, row in enumerate(rows) if fits[place]}
            self._fruitful |= any(fits)
            self._dropped += fits.count(False)
            self._taken += len(rows)
            self.position += len(rows)
        return [(position, position) for position in stream.drawn]

    def _fill(self) -> None:
        """Reads the next block."""
        stream = self._stream
        if self._dropped:
            stream.say(
                f"{stream.key}: {self._dropped:,} of {self.position:,} rows so far had prompts of more tokens than "
                f"data.max_prompt_tokens={stream.most}. They were dropped"
            )
        found = list(islice(self._reading, stream.buffer))
        if not found:
            if not self._fruitful:
                raise ValueError(
                    f"{stream.key}: no prompt of an epoch is as short as data.max_prompt_tokens={stream.most}; raise it"
                )
            self._fruitful = False
            self._at = StreamPosition(self._at.epoch + 1, 0, 0)
            self._reading = self._read(self._at)
            found = list(islice(self._reading, stream.buffer))
        order = torch.randperm(len(found), generator=generator(self._seed, self.position)).tolist()
        self._block = [found[place][1] for place in order]
        self._begun, self._at, self._taken = self._at, found[-1][0], 0

    def _read(self, at: StreamPosition) -> Iterator[tuple[StreamPosition, Row]]:
        """The rows of an epoch from a place on, each with the place behind it."""
        parts, start = self._stream.parts, at.row
        shuffled = torch.randperm(len(parts), generator=generator(self._seed, -1 - at.epoch)).tolist()
        order = shuffled if self._stream.buffer > 1 else range(len(parts))
        for place in range(at.part, len(parts)):
            for number, row in enumerate(parts[order[place]](start), start + 1):
                yield StreamPosition(at.epoch, place, number), row
            start = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the block began that is being drawn from, and how much of it is taken."""
        known = {"begun": tuple(self._begun), "taken": self._taken}
        return super().state_dict() | known | {"dropped": self._dropped, "fruitful": self._fruitful}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Reads the block again."""
        self.position = state["position"] - state["taken"]
        self._at = StreamPosition(*state["begun"])
        self._reading = self._read(self._at)
        self._dropped, self._fruitful = 0, True
        self._fill()
        self._dropped, self._fruitful = state["dropped"], state["fruitful"]
        super().load_state_dict(state)
        self._taken = state["taken"]
