"""Rows of several data sets, each with its share of what is drawn."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor
from typing import Any

import torch

from rft.data.lazy import Joined, Row, Rows, chosen, load
from rft.data.order import Cursor, generator
from rft.data.stream import Stream, StreamCursor
from rft.registry import Target

APART = 1_000_000_007  # epochs between the streams of random numbers of two parts


@dataclass
class Part:
    """A data set of a mixture.

    Attributes:
        weight: its share of the rows that are drawn is this, divided by the sum of all.
        rows: a class that loads rows, as in `data.train`.
    """

    weight: float
    rows: Any


class Mixture:
    """Parts that are drawn from in proportion to their weights, whatever their sizes.

    Every part is walked through in shuffled epochs of its own: one that is smaller than its share comes again sooner.

    Args:
        parts: by their names; a row that has no `data_source` gets its part's name there.
        key: supplied; the node's place in the yaml, for messages.

    Raises:
        ValueError: there is no part, or a weight is not above 0.
    """

    def __init__(self, parts: dict[str, Part], key: str) -> None:
        if not parts:
            raise ValueError(f"{key}.parts is empty: name at least one, as {{weight: 1.0, rows: {{_target_: ...}}}}")
        for name, part in parts.items():
            if not part.weight > 0:
                raise ValueError(f"{key}.parts.{name}.weight={part.weight}: set it above 0, or take the part out")
        self._parts = parts
        self._targets = {name: Target(part.rows, f"{key}.parts.{name}.rows", ("key",)) for name, part in parts.items()}

    def load(self, required: Sequence[str]) -> "Mixed":
        """All rows of all parts; raises what their classes raise."""
        loaded = {name: load(target, required) for name, target in self._targets.items()}
        return Mixed(loaded, {name: part.weight for name, part in self._parts.items()})


class Mixed(Joined):
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
        row = super()._find(number)
        if row.get("data_source") is not None:
            return row
        return row | {"data_source": list(self.parts)[bisect_right(self.ends, number)]}

    def kept(self, numbers: Sequence[int], key: str) -> "Mixed":
        """The mixture without the rows that are too long.

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
            parts[name] = chosen(rows, left)
            start = end
        return Mixed(parts, self.weights)


class MixedCursor(Cursor):
    """Walks through a mixture: rounds in which every part has its share, in shuffled order.

    A round is as short as lets the smallest share have a row. After every round each part has had its share of all
    draws so far to within one row; exactly, where the shares of a round are whole.

    Args:
        rows: of the mixture.
        seed: changes every permutation.
    """

    def __init__(self, rows: Mixed, seed: int) -> None:
        super().__init__(len(rows), seed)
        self._starts = [0, *rows.ends]
        weights = [Fraction(weight) for weight in rows.weights.values()]
        shares = [weight / sum(weights) for weight in weights]
        self._until = list(accumulate(shares))  # of the parts up to each
        self._length = ceil(1 / min(shares))
        self._round = -1
        self._rows: list[int] = []
        self._epochs: dict[int, tuple[int, list[int]]] = {}  # of each part: which one, and its order

    def _row(self, position: int) -> int:
        number, place = divmod(position, self._length)
        if number != self._round:
            self._rows = self._shuffled(number)
            self._round = number
        return self._rows[place]

    def _shuffled(self, number: int) -> list[int]:
        """The rows of a round."""
        before, after = self._drawn(number * self._length), self._drawn((number + 1) * self._length)
        turns = [part for part, (start, end) in enumerate(zip(before, after, strict=True)) for _ in range(start, end)]
        order = torch.randperm(self._length, generator=generator(self._seed, number)).tolist()
        rows = []
        for part in (turns[place] for place in order):
            rows.append(self._draw(part, before[part]))
            before[part] += 1
        return rows

    def _drawn(self, total: int) -> list[int]:
        """How many of so many draws each part has: the ends of the shares, rounded, so that they sum up to all."""
        ends = [floor(total * until + Fraction(1, 2)) for until in self._until]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def _draw(self, part: int, number: int) -> int:
        """The row that is the part's draw of this number."""
        start, end = self._starts[part : part + 2]
        epoch, place = divmod(number, end - start)
        if self._epochs.get(part, (-1,))[0] != epoch:
            stream = generator(self._seed, (part + 1) * APART + epoch)
            self._epochs[part] = epoch, torch.randperm(end - start, generator=stream).tolist()
        return start + self._epochs[part][1][place]


def cursor(rows: Rows, seed: int) -> Cursor:
    """The order in which rows are drawn: by epochs of all, by the shares of a mixture, or as they come."""
    if isinstance(rows, Stream):
        return StreamCursor(rows, seed)
    return MixedCursor(rows, seed) if isinstance(rows, Mixed) else Cursor(len(rows), seed)
