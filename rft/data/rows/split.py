"""Subsets of rows: a share by the hash of a field, or the rows that are not in another data set.

Both depend on the value of a field, not on the position of a row, so that rows of one prompt stay together.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from rft.data.row_checks import digest, identity
from rft.data.rows.lazy import Rows, load, subset
from rft.ranges import Fraction, PositiveInt
from rft.registry import Target


class HashSplit:
    """Rows whose hash of the field `by` lies in `share`. Equal values always land in the same split.

    Args:
        rows: a class that loads rows, as in `data.train`.
        by: the field.
        share: [start, end) between 0 and 1. The hash is BLAKE2b, the same on every machine, as a number in [0, 1).
        key: supplied by the run: the yaml key of the node, for messages.

    Raises:
        ValueError: the share is empty, or not between 0 and 1.
    """

    def __init__(self, rows: Any, by: str, share: list[Fraction], key: str) -> None:
        if len(share) != 2 or not 0 <= share[0] < share[1] <= 1:
            raise ValueError(f"{key}.share={share}: give its start and end between 0 and 1, such as [0.0, 0.8]")
        self._rows = Target(rows, f"{key}.rows", ("key",))
        self._by = by
        self._start, self._end = share
        self._key = key

    def load(self, required: Sequence[str]) -> Rows:
        """The rows of the share, in their order; raises what their class raises, or a ValueError if there are none.

        Args:
            required: fields that every row must have, not null.
        """
        rows = load(self._rows, {*required, self._by})
        hashes = (_hash(row[self._by]) for row in rows)
        numbers = array("q", (number for number, value in enumerate(hashes) if self._start <= value < self._end))
        if not numbers:
            raise ValueError(
                f"{self._key}.share=[{self._start}, {self._end}] leaves none of {len(rows)} rows; widen it"
            )
        return subset(rows, numbers)


class ExcludeRows:
    """Rows whose value of the field `by` occurs in no row of another data set, such as the training set.

    Args:
        rows, others: classes that load rows, as in `data.train`.
        by: the field.
        limit: takes the first `limit` of the remaining rows, or all if null.
        key: supplied by the run: the yaml key of the node, for messages.
    """

    def __init__(self, rows: Any, others: Any, by: str, limit: PositiveInt | None, key: str) -> None:
        self._rows = Target(rows, f"{key}.rows", ("key",))
        self._others = Target(others, f"{key}.others", ("key",))
        self._by = by
        self._limit = limit
        self._key = key

    def load(self, required: Sequence[str]) -> Rows:
        """The remaining rows, in their order.

        Args:
            required: fields that every row must have, not null.

        Raises:
            ValueError: none is left, or none is left out, as where the two are written differently; or what the
                classes raise.
        """
        rows = load(self._rows, {*required, self._by})
        others = load(self._others, [self._by])
        digests = {digest(row[self._by]) for row in others}
        numbers = array("q", (number for number, row in enumerate(rows) if digest(row[self._by]) not in digests))
        if len(numbers) in (0, len(rows)):
            found = "all of them are" if not numbers else "none of them is"
            raise ValueError(
                f"{self._key}: {found} among the {len(others)} of {self._key}.others by the field {self._by!r}; check "
                "the paths of both"
            )
        return subset(rows, numbers[: self._limit])


def _hash(value: Any) -> float:
    """The hash of a value as a number in [0, 1)."""
    digest = hashlib.blake2b(identity(value).encode(), digest_size=6).digest()  # 48 bits are exact in a float
    return int.from_bytes(digest, "big") / 2**48
