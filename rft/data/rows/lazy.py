"""Rows that are read when they are indexed, so that large data sets need not be in memory."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from rft.registry import Target

Row = dict[str, Any]
Rows = Sequence[Row]


def load(target: Target, fields: Iterable[str]) -> Rows:
    """Builds a class of rows and loads its rows; raises what its `load` raises.

    Args:
        target: the class, with its options.
        fields: fields that every row must have, not null.
    """
    rows: Rows = target.build(key=target.key).load(sorted(set(fields)))
    return rows


class LazyRows(Sequence[Row]):
    """A sequence that calls `read` whenever a row is indexed, and caches nothing.

    Args:
        count: number of rows.
        read: returns the row of an index from 0 to count - 1.
        where: returns the file and line of an index, for messages; None if they are unknown.
    """

    def __init__(self, count: int, read: Callable[[int], Row], where: Callable[[int], str] | None = None) -> None:
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


class ListedRows(list[Row]):
    """Rows in memory.

    Attributes:
        places: the file and line of each, such as "train.jsonl line 7".
    """

    def __init__(self, located: Iterable[tuple[str, Row]]) -> None:
        super().__init__()
        self.places: list[str] = []
        for where, row in located:
            self.places.append(where)
            self.append(row)


def subset(rows: Rows, numbers: Sequence[int]) -> Rows:
    """The rows of these indices."""
    return LazyRows(len(numbers), lambda index: rows[numbers[index]], lambda index: place(rows, numbers[index]))


def place(rows: Rows, number: int) -> str:
    """The file and line of a row, for messages, or its number from 1 on if the rows do not know them."""
    if isinstance(rows, ListedRows):
        return rows.places[number]
    if isinstance(rows, LazyRows) and rows.where is not None:
        return rows.where(number)
    return f"row {number + 1}"
