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
    """

    def __init__(self, count: int, read: Callable[[int], Row]) -> None:
        self._count = count
        self._read = read

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
        super().__init__(self.ends[-1], self._find)

    def _find(self, number: int) -> Row:
        part = bisect_right(self.ends, number)
        return self._parts[part][number - self.ends[part]]


def subset(rows: Rows, numbers: Sequence[int]) -> Rows:
    """The rows of these indices."""
    return LazyRows(len(numbers), lambda index: rows[numbers[index]])
