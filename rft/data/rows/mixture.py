"""Rows of several data sets, each with its share of the rows that are drawn."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import ConcatRows, Row, Rows, load, subset
from rft.data.rows.stream import RowStream, StreamableRows, StreamedRows, check_streamable
from rft.ranges import PositiveFloat
from rft.registry import Target


@dataclass
class MixturePart:
    """A data set of a mixture.

    Attributes:
        weight: its share of the rows that are drawn is this, divided by the sum of all weights.
        rows: a class of rows, as in `data.train`.
    """

    weight: PositiveFloat
    rows: Any


class Mixture(StreamableRows):
    """Data sets that are drawn from in proportion to their weights, whatever their sizes.

    Every part has shuffled epochs of its own: the rows of a part that is small for its share repeat sooner.

    Args:
        parts: by their names; a row without `data_source` gets its part's name as such.
        key: supplied; the node's place in the yaml, for messages.

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
                raise ValueError(f"{target.key}: a mixture in a mixture would lose its weights; name its parts here")

    def load(self, required: Sequence[str]) -> "Mixed":
        """All rows of all parts; raises what their classes raise."""
        return Mixed({name: load(target, required) for name, target in self._targets.items()}, self._weights)

    def stream(self, required: Sequence[str]) -> "MixedStream":
        """See `StreamableRows.stream`; raises a ValueError where a part cannot be streamed."""
        for target in self._targets.values():
            check_streamable(target)
        parts = {name: target.build(key=target.key).stream(required) for name, target in self._targets.items()}
        return MixedStream(parts, self._weights)


class Mixed(ConcatRows):
    """The rows of a mixture, one part behind the other.

    Args:
        parts: rows by the name of the part, none of them empty.
        weights: of the parts.
    """

    def __init__(self, parts: Mapping[str, Rows], weights: Mapping[str, float]) -> None:
        super().__init__(list(parts.values()))
        self.parts = parts
        self.weights = weights

    def _find(self, number: int) -> Row:
        return named(super()._find(number), list(self.parts)[bisect_right(self.ends, number)])

    def kept(self, numbers: Sequence[int], key: str) -> "Mixed":
        """The mixture with some of its rows only.

        Args:
            numbers: of the rows that stay, ascending.
            key: of the mixture in the yaml.

        Raises:
            ValueError: a part would be left without rows; names the part.
        """
        parts, start = {}, 0
        for (name, rows), end in zip(self.parts.items(), self.ends, strict=True):
            left = [number - start for number in numbers[bisect_left(numbers, start) : bisect_left(numbers, end)]]
            if not left:
                raise ValueError(f"{key}.parts.{name}: no prompt is as short as data.max_prompt_tokens; raise that")
            parts[name] = subset(rows, left)
            start = end
        return Mixed(parts, self.weights)


def named(row: Row, part: str) -> Row:
    """The row, with the name of its part as `data_source` if it has none."""
    return row | {"data_source": part} if row.get("data_source") is None else row


class MixedStream(StreamedRows):
    """The rows of a mixture of streams.

    Args:
        parts: streams by the name of the part.
        weights: of the parts.
    """

    def __init__(self, parts: Mapping[str, RowStream], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.parts = parts
        self.weights = weights

    def preview(self) -> Mixed:
        return Mixed({name: part.preview() for name, part in self.parts.items()}, self.weights)

    def open(self, buffer: int, encoder: Encoder, most: int | None, say: Callable[[str], None]) -> "MixedStream":
        parts = {name: part.open(buffer, encoder, most, say) for name, part in self.parts.items()}
        return MixedStream(parts, self.weights)
