"""Rows of several data sets, which are drawn in proportion to the weights of the data sets."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rft.data.rows.lazy import ConcatRows, Row, Rows, load, subset
from rft.data.rows.stream import RowFilter, RowStream, StreamableRows, StreamedRows, check_streamable
from rft.ranges import PositiveFloat
from rft.registry import Target


@dataclass
class MixturePart:
    """A data set of a mixture.

    Attributes:
        weight: the part is drawn with the share weight / (sum of all weights).
        rows: a class of rows, as in `data.train`.
    """

    weight: PositiveFloat
    rows: Any


class Mixture(StreamableRows):
    """Data sets whose rows are drawn in proportion to their weights, whatever their sizes.

    Every part has its own shuffled epochs: rows of a part that is small for its share repeat sooner.

    Args:
        parts: the parts by name; the name becomes the `data_source` of rows that have none.
        key: supplied by the run: the yaml key of the node, for messages.

    Raises:
        ValueError: there is no part, or a part is a mixture.
    """

    def __init__(self, parts: dict[str, MixturePart], key: str) -> None:
        if not parts:
            raise ValueError(f"{key}.parts is empty: name at least one, as {{weight: 1.0, rows: {{_target_: ...}}}}")
        self._weights = {name: part.weight for name, part in parts.items()}
        self._targets = {name: Target(part.rows, f"{key}.parts.{name}.rows", ("key",)) for name, part in parts.items()}
        for target in self._targets.values():
            if target.factory is Mixture:
                raise ValueError(
                    f"{target.key}: the weights of a mixture inside a mixture would be lost; list its parts here"
                )

    def load(self, required: Sequence[str]) -> "Mixed":
        """All rows of all parts; raises what their classes raise."""
        return Mixed({name: load(target, required) for name, target in self._targets.items()}, self._weights)

    def stream(self, required: Sequence[str]) -> "MixedStream":
        """The stream of the rows; raises a ValueError if a part cannot be streamed."""
        for target in self._targets.values():
            check_streamable(target)
        parts = {name: target.build(key=target.key).stream(required) for name, target in self._targets.items()}
        return MixedStream(parts, self._weights)


class Mixed(ConcatRows):
    """The concatenated rows of a mixture.

    Args:
        parts: rows by the name of the part, none of them empty.
        weights: the weights of the parts.
    """

    def __init__(self, parts: Mapping[str, Rows], weights: Mapping[str, float]) -> None:
        super().__init__(list(parts.values()))
        self.parts = parts
        self.weights = weights

    def _find(self, number: int) -> Row:
        return named(super()._find(number), list(self.parts)[bisect_right(self.ends, number)])

    def kept(self, numbers: NDArray[np.int64], key: str, limit: str) -> "Mixed":
        """The mixture with some of its rows.

        Args:
            numbers: indices of the rows to keep, ascending.
            key: the yaml key of the mixture.
            limit: what the other rows exceed, for messages.

        Raises:
            ValueError: a part would have no rows; names the part.
        """
        parts, start = {}, 0
        for (name, rows), end in zip(self.parts.items(), self.ends, strict=True):
            left = numbers[np.searchsorted(numbers, start) : np.searchsorted(numbers, end)] - start
            if not len(left):
                raise ValueError(f"{key}.parts.{name}: all rows have more tokens than {limit}; raise the limit")
            parts[name] = subset(rows, left)
            start = end
        return Mixed(parts, self.weights)


def named(row: Row, part: str) -> Row:
    """The row; if it has no `data_source`, the name of its part is added as such."""
    return row | {"data_source": part} if row.get("data_source") is None else row


class MixedStream(StreamedRows):
    """The rows of a mixture of streams.

    Args:
        parts: streams by the name of the part.
        weights: the weights of the parts.
    """

    def __init__(self, parts: Mapping[str, RowStream], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.parts = parts
        self.weights = weights

    def preview(self) -> Mixed:
        return Mixed({name: part.preview() for name, part in self.parts.items()}, self.weights)

    def open(self, buffer: int, filters: Sequence[RowFilter], log: Callable[[str], None]) -> "MixedStream":
        parts = {name: part.open(buffer, filters, log) for name, part in self.parts.items()}
        return MixedStream(parts, self.weights)


def check_mixtures(held_out: Mapping[str, Target]) -> Iterator[str]:
    """Checks that only `data.train` is a mixture."""
    for target in held_out.values():
        if target.factory is Mixture:
            yield (
                f"{target.key}: an evaluation uses all rows of a set, so the weights of a mixture have no effect; give "
                "each part of the mixture its own name under data.eval"
            )
