"""Rows of several data sets, which are drawn in proportion to the weights of the data sets."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rft.batch.counter_rng import generator
from rft.data.rows.base import RowFilter, StreamableRows, StreamedRows, WeightedRows, check_streamable, is_weighted
from rft.data.rows.lazy import ConcatRows, Row, Rows, load, subset
from rft.data.sampler import RowSampler, make_sampler
from rft.ranges import PositiveFloat
from rft.registry import Target

PART_SEEDS = 1_000_000_007  # distance between the seeds, or the first epochs, of two parts of a mixture


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

    weighted = True

    def __init__(self, parts: dict[str, MixturePart], key: str) -> None:
        if not parts:
            raise ValueError(f"{key}.parts is empty: name at least one, as {{weight: 1.0, rows: {{_target_: ...}}}}")
        self._weights = {name: part.weight for name, part in parts.items()}
        self._targets = {name: Target(part.rows, f"{key}.parts.{name}.rows", ("key",)) for name, part in parts.items()}
        for target in self._targets.values():
            if is_weighted(target):
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


class Mixed(ConcatRows, WeightedRows):
    """The concatenated rows of a mixture.

    Args:
        parts: rows by the name of the part, none of them empty.
        weights: the weights of the parts.
    """

    def __init__(self, parts: Mapping[str, Rows], weights: Mapping[str, float]) -> None:
        super().__init__(list(parts.values()))
        self.parts = parts
        self.weights = weights

    def sampler(self, seed: int, shuffle: bool) -> "MixtureSampler":
        return MixtureSampler(self, seed, shuffle)

    def _find(self, number: int) -> Row:
        return named(super()._find(number), list(self.parts)[bisect_right(self.ends, number)])

    def kept(self, numbers: NDArray[np.int64], key: str, limit: str) -> "Mixed":
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

    def __init__(self, parts: Mapping[str, StreamedRows], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.parts = parts
        self.weights = weights

    def sampler(self, seed: int, shuffle: bool) -> "MixtureSampler":
        return MixtureSampler(self, seed, shuffle)

    def preview(self) -> Mixed:
        return Mixed({name: part.preview() for name, part in self.parts.items()}, self.weights)

    def open(self, buffer: int, filters: Sequence[RowFilter], log: Callable[[str], None]) -> "MixedStream":
        parts = {name: part.open(buffer, filters, log) for name, part in self.parts.items()}
        return MixedStream(parts, self.weights)


class MixtureSampler(RowSampler):
    """Draws rows of the parts of a mixture in proportion to their weights, whatever their sizes.

    Draws are grouped into rounds of ceil(1 / smallest share) draws. In each round every part has its share of the
    draws, in shuffled order, or part after part. After every round each part has had its share of all draws so far to
    within one row; exactly, if the shares of a round are integers. Each part has its own epochs. Rows that a stream
    drops do not count as draws.

    Args:
        rows: the rows of a mixture.
        seed: determines every order.
        shuffle: `data.shuffle`; false: rounds have the parts, and epochs the rows of a part, in their own order.
    """

    def __init__(self, rows: Mixed | MixedStream, seed: int, shuffle: bool = True) -> None:
        super().__init__(rows, seed, shuffle)
        exact = [Fraction(weight) for weight in rows.weights.values()]
        shares = [weight / sum(exact) for weight in exact]
        self._until = list(accumulate(shares))  # cumulative shares of the parts
        self._length = ceil(1 / min(shares))  # draws of a round
        self._round = -1
        self._turns: list[tuple[int, int]] = []
        self._mixture = rows
        self._starts = [0, *rows.ends] if isinstance(rows, Mixed) else []
        self._parts: list[RowSampler] = []
        for number, part in enumerate(rows.parts.values(), 1):
            apart = number * PART_SEEDS
            streamed = isinstance(part, StreamedRows)
            self._parts.append(
                make_sampler(part, seed + apart, shuffle) if streamed else RowSampler(part, seed, shuffle, apart)
            )

    def take(self, number: int, weights: Tensor | None = None) -> list[tuple[int, int]]:
        if not isinstance(self._mixture, MixedStream):
            return super().take(number, weights)
        assert weights is None, "rows of a stream have no weights"
        start, self.position = self.position, self.position + number
        parts = [self._turn(position)[0] for position in range(start, self.position)]
        for part, sampler in enumerate(self._parts):
            sampler.take(parts.count(part))
        names, streams = list(self._mixture.parts), self._mixture.parts.values()
        rows = [iter(stream.drawn.values()) for stream in streams]
        self._mixture.drawn = {index: named(next(rows[part]), names[part]) for index, part in enumerate(parts, start)}
        return [(position, position) for position in self._mixture.drawn]

    def row_at(self, position: int) -> int:
        """The row of the mixture at a position."""
        part, number = self._turn(position)
        return self._starts[part] + self._parts[part].row_at(number)

    def _turn(self, position: int) -> tuple[int, int]:
        """The part that is drawn at a position, and the number of its earlier draws."""
        number, index = divmod(position, self._length)
        if number != self._round:
            self._turns = self._draws_of_round(number)
            self._round = number
        return self._turns[index]

    def _draws_of_round(self, number: int) -> list[tuple[int, int]]:
        """(part, number of its earlier draws) for each draw of a round."""
        before, after = self._draws(number * self._length), self._draws((number + 1) * self._length)
        parts = [part for part, (start, end) in enumerate(zip(before, after, strict=True)) for _ in range(start, end)]
        order: Iterable[int] = range(self._length)
        if self._shuffle:
            order = torch.randperm(self._length, generator=generator(self._seed, number)).tolist()
        turns = []
        for index in order:
            turns.append((parts[index], before[parts[index]]))
            before[parts[index]] += 1
        return turns

    def _draws(self, total: int) -> list[int]:
        """How many of the first `total` draws each part has: cumulative shares are rounded, so that they add up."""
        ends = [floor(total * until + Fraction(1, 2)) for until in self._until]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    def state_dict(self) -> dict[str, Any]:
        """The position, and the states of the parts of a streamed mixture."""
        if not isinstance(self._mixture, MixedStream):
            return super().state_dict()
        return {"position": self.position, "parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of `state_dict`; see `RowSampler.load_state_dict`."""
        if not isinstance(self._mixture, MixedStream):
            super().load_state_dict(state)
            return
        self.position = state["position"]
        for part, own in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(own)
