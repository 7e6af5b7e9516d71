"""Rows that are read when they are indexed, so that large data sets need not be in memory."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rft.errors import prefixed
from rft.registry import Target

Row = dict[str, Any]
Rows = Sequence[Row]
ConvertRow = Callable[[str, Row], Row]  # (file and line for messages, row as read) -> row of this project


def load(target: Target, fields: Iterable[str]) -> Rows:
    """Builds a class of rows and loads its rows; raises what its `load` raises.

    Args:
        target: the class, with its options.
        fields: fields that every row must have, not null.
    """
    rows: Rows = target.build(key=target.key).load(sorted(set(fields)))
    return rows


def numbered(number: int) -> str:
    """The place of a row that is known only by its index."""
    return f"row {number + 1}"


class PlacedRows(list[Row]):
    """Rows in memory that know the place of each: file and line.

    Args:
        located: (place, row) pairs.
    """

    def __init__(self, located: Iterable[tuple[str, Row]]) -> None:
        pairs = list(located)
        super().__init__(row for _, row in pairs)
        self.places = [where for where, _ in pairs]


class LazyRows(Sequence[Row]):
    """A sequence that calls `read` whenever a row is indexed, and caches nothing.

    Args:
        count: number of rows.
        read: returns the row of an index from 0 to count - 1.
        where: returns the place of such a row, such as its file and line, for messages.
    """

    def __init__(self, count: int, read: Callable[[int], Row], where: Callable[[int], str] = numbered) -> None:
        self._count = count
        self._read = read
        self.where = where

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self._read(index) for index in range(*number.indices(self._count))]
        if not -self._count <= number < self._count:
            raise IndexError(f"row {number} of {self._count}")
        return self._read(number % self._count)


class ConcatRows(LazyRows):
    """Concatenates the rows of several parts.

    Args:
        parts: none of them empty.
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.ends = list(accumulate(map(len, parts)))
        self._parts = parts
        super().__init__(self.ends[-1], self._find, lambda number: place(*self._locate(number)))

    def _locate(self, number: int) -> tuple[Rows, int]:
        part = bisect_right(self.ends, number)
        return self._parts[part], number - self.ends[part] + len(self._parts[part])

    def _find(self, number: int) -> Row:
        part, index = self._locate(number)
        return part[index]


def subset(rows: Rows, numbers: Sequence[int] | NDArray[np.integer]) -> Rows:
    """The rows of these indices, which may be an array."""
    return LazyRows(
        len(numbers), lambda index: rows[int(numbers[index])], lambda index: place(rows, int(numbers[index]))
    )


def place(rows: Rows, number: int) -> str:
    """The place of a row, for messages: its file and line, or its number if the rows know no more."""
    if isinstance(rows, PlacedRows):
        return rows.places[number]
    return rows.where(number) if isinstance(rows, LazyRows) else numbered(number)


def located(rows: Rows, number: int) -> AbstractContextManager[None]:
    """Puts the place of a row before the message of a ValueError that is raised inside."""
    return prefixed(f"{place(rows, number)}: ")
