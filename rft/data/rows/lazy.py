"""Rows that are read when they are indexed, so that large data is in memory once or not at all."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from rft.registry import Target

Row = dict[str, Any]
Rows = Sequence[Row]


def load(target: Target, fields: Iterable[str]) -> Rows:
    """Loads the rows of a class of rows; raises what its `load` raises.

    Args:
        target: the class in the yaml.
        fields: those that every row must have, not null.
    """
    rows: Rows = target.build(key=target.key).load(sorted(set(fields)))
    return rows


class LazyRows(Sequence[Row]):
    """A number of rows, each read anew whenever it is indexed.

    Args:
        count: of rows.
        read: the row of a number from 0 to count - 1.
    """

    def __init__(self, count: int, read: Callable[[int], Row]) -> None:
        self._count = count
        self._read = read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self._read(place) for place in range(*number.indices(self._count))]
        if not -self._count <= number < self._count:
            raise IndexError(f"row {number} of {self._count}")
        return self._read(number % self._count)


class ConcatRows(LazyRows):
    """The rows of several parts, one part behind the other.

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
    """The rows of these numbers."""
    return LazyRows(len(numbers), lambda place: rows[numbers[place]])
