"""The abstract classes of rows: those of a stream, those with weights, and classes of rows that can be streamed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rft.data.rows.lazy import Row, Rows
from rft.registry import Target


@dataclass(frozen=True)
class RowFilter:
    """Drops rows of a stream when they are read.

    Attributes:
        keeps: for each of some rows, whether it stays.
        why: the others are dropped, for messages.
    """

    keeps: Callable[[list[Row]], list[bool]]
    why: str


class OwnOrder(ABC):
    """Rows that are drawn in an order of their own."""

    @abstractmethod
    def sampler(self, seed: int, shuffle: bool) -> Any:
        """Draws them, as a `rft.data.sampler.RowSampler` with these arguments."""


class WeightedRows(OwnOrder):
    """Rows of several data sets, which are drawn by the weights of the data sets."""

    @abstractmethod
    def kept(self, numbers: NDArray[np.int64], key: str, limit: str) -> Rows:
        """Some of the rows, with the same weights.

        Args:
            numbers: indices of the rows to keep, ascending.
            key: the yaml key of the rows.
            limit: what the other rows exceed, for messages.

        Raises:
            ValueError: a data set would have no rows; names it.
        """


class StreamedRows(Sequence[Row], OwnOrder):
    """Rows of a stream by position. Only the rows of the last draw can be indexed.

    Attributes:
        drawn: the rows of the last draw; the sampler sets it.
    """

    def __init__(self) -> None:
        self.drawn: dict[int, Row] = {}

    @abstractmethod
    def preview(self) -> Rows:
        """The first rows, for checks before a model is loaded.

        Raises:
            ValueError: there are no rows, or one of them is malformed.
        """

    @abstractmethod
    def open(self, buffer: int, filters: Sequence["RowFilter"], log: Callable[[str], None]) -> "StreamedRows":
        """A new stream of the same rows for one sampler; `RowStream` explains the arguments."""

    def __len__(self) -> int:
        raise ValueError(
            "data.streaming: this way of drawing rows needs their number, which a stream does not know; set "
            "data.streaming=null"
        )

    def __getitem__(self, position: Any) -> Any:
        return self.drawn[position]


class StreamableRows(ABC):
    """A class of rows that can be streamed.

    Attributes:
        weighted: its rows are drawn by weights, which are lost where others are made of them.
    """

    weighted: ClassVar[bool] = False

    @abstractmethod
    def stream(self, required: Sequence[str]) -> StreamedRows:
        """The stream of the rows. Raises what `load` raises; an error in a row is raised when the row is read.

        Args:
            required: fields that every row must have, not null.
        """


def check_stream(buffer: int | None, train: Target) -> None:
    """Raises a ValueError if the rows cannot be streamed."""
    if buffer is not None:
        check_streamable(train)


def check_streamable(rows: Target) -> None:
    """Raises a ValueError if rows cannot be streamed: those of a function, and of most classes."""
    if not (isinstance(rows.factory, type) and issubclass(rows.factory, StreamableRows)):
        raise ValueError(
            f"data.streaming: {rows.key} is a {rows.factory.__name__}, which cannot be streamed; set "
            "data.streaming=null"
        )


def is_weighted(rows: Target) -> bool:
    """Whether the rows of a class are drawn by weights."""
    factory = rows.factory
    return isinstance(factory, type) and issubclass(factory, StreamableRows) and factory.weighted


def check_mixtures(held_out: Mapping[str, Target]) -> Iterator[str]:
    """Checks that only `data.train` is a mixture."""
    for target in held_out.values():
        if is_weighted(target):
            yield (
                f"{target.key}: an evaluation uses all rows of a set, so the weights of a mixture have no effect; give "
                "each part of the mixture its own name under data.eval"
            )
