"""Rows of several data sets, each with its share of what is drawn."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor
from typing import Any

import torch
from torch import Tensor

from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import ConcatRows, Row, Rows, load, subset
from rft.data.rows.stream import Drawn, Stream, StreamCursor, Streams, Unread, check_streams
from rft.data.sampler import Cursor, generator
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


class Mixture(Streams):
    """Parts that are drawn from in proportion to their weights, whatever their sizes.

    Every part is walked through in shuffled epochs of its own: one that is smaller than its share comes again sooner.

    Args:
        parts: by their names; a row that has no `data_source` gets its part's name there.
        key: supplied; the node's place in the yaml, for messages.

    Raises:
        ValueError: there is no part, a weight is not above 0, or a part is a mixture.
    """

    def __init__(self, parts: dict[str, Part], key: str) -> None:
        if not parts:
            raise ValueError(f"{key}.parts is empty: name at least one, as {{weight: 1.0, rows: {{_target_: ...}}}}")
        for name, part in parts.items():
            if not part.weight > 0:
                raise ValueError(f"{key}.parts.{name}.weight={part.weight}: set it above 0, or take the part out")
        self._weights = {name: part.weight for name, part in parts.items()}
        self._targets = {name: Target(part.rows, f"{key}.parts.{name}.rows", ("key",)) for name, part in parts.items()}
        for target in self._targets.values():
            if target.factory is Mixture:
                raise ValueError(f"{target.key}: a mixture in a mixture would lose its weights; name its parts here")

    def load(self, required: Sequence[str]) -> "Mixed":
        """All rows of all parts; raises what their classes raise."""
        return Mixed({name: load(target, required) for name, target in self._targets.items()}, self._weights)

    def stream(self, required: Sequence[str]) -> "MixedShards":
        """See `Streams.stream`; raises a ValueError where a part cannot be read so."""
        for target in self._targets.values():
            check_streams(target)
        parts = {name: target.build(key=target.key).stream(required) for name, target in self._targets.items()}
        return MixedShards(parts, self._weights)


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
            parts[name] = subset(rows, left)
            start = end
        return Mixed(parts, self.weights)


def named(row: Row, part: str) -> Row:
    """The row with the name of its part, where it has no `data_source` of its own."""
    return row | {"data_source": part} if row.get("data_source") is None else row


class Turns:
    """Whose turn it is: rounds in which every part has its share, in shuffled order.

    A round is as short as lets the smallest share have a row. After every round each part has had its share of all
    draws so far to within one row; exactly, where the shares of a round are whole.

    Args:
        weights: of the parts.
        seed: changes every order.
    """

    def __init__(self, weights: Iterable[float], seed: int) -> None:
        exact = [Fraction(weight) for weight in weights]
        shares = [weight / sum(exact) for weight in exact]
        self._until = list(accumulate(shares))  # of the parts up to each
        self._length = ceil(1 / min(shares))
        self._seed = seed
        self._round = -1
        self._turns: list[tuple[int, int]] = []

    def __getitem__(self, position: int) -> tuple[int, int]:
        """The part whose turn it is at a position, and how many it has had before."""
        number, place = divmod(position, self._length)
        if number != self._round:
            self._turns = self._shuffled(number)
            self._round = number
        return self._turns[place]

    def _shuffled(self, number: int) -> list[tuple[int, int]]:
        """The turns of a round."""
        had, after = self._had(number * self._length), self._had((number + 1) * self._length)
        parts = [part for part, (start, end) in enumerate(zip(had, after, strict=True)) for _ in range(start, end)]
        turns = []
        for place in torch.randperm(self._length, generator=generator(self._seed, number)).tolist():
            turns.append((parts[place], had[parts[place]]))
            had[parts[place]] += 1
        return turns

    def _had(self, total: int) -> list[int]:
        """How many of so many draws each part has: the ends of the shares, rounded, so that they sum up to all."""
        ends = [floor(total * until + Fraction(1, 2)) for until in self._until]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


class MixedCursor(Cursor):
    """Walks through a mixture, each part in shuffled epochs of its own.

    Args:
        rows: of the mixture.
        seed: changes every permutation.
    """

    def __init__(self, rows: Mixed, seed: int) -> None:
        super().__init__(len(rows), seed)
        self._starts = [0, *rows.ends]
        self._turns = Turns(rows.weights.values(), seed)
        self._epochs: dict[int, tuple[int, list[int]]] = {}  # of each part: which one, and its order

    def _row(self, position: int) -> int:
        return self._draw(*self._turns[position])

    def _draw(self, part: int, number: int) -> int:
        """The row that is the part's draw of this number."""
        start, end = self._starts[part : part + 2]
        epoch, place = divmod(number, end - start)
        if self._epochs.get(part, (-1,))[0] != epoch:
            stream = generator(self._seed, (part + 1) * APART + epoch)
            self._epochs[part] = epoch, torch.randperm(end - start, generator=stream).tolist()
        return start + self._epochs[part][1][place]


@dataclass
class MixedShards(Unread):
    """The files or shards of a mixture, by its parts, and their weights."""

    parts: Mapping[str, Unread]
    weights: Mapping[str, float]

    def first(self) -> Mixed:
        return Mixed({name: part.first() for name, part in self.parts.items()}, self.weights)

    def open(self, buffer: int, encoder: Encoder, most: int | None, say: Callable[[str], None]) -> "MixedStream":
        parts = {name: part.open(buffer, encoder, most, say) for name, part in self.parts.items()}
        return MixedStream(parts, self.weights)


class MixedStream(Drawn):
    """The rows of a mixture of streams.

    Args:
        parts: streams by the name of the part.
        weights: of the parts.
    """

    def __init__(self, parts: Mapping[str, Drawn], weights: Mapping[str, float]) -> None:
        super().__init__()
        self.parts = parts
        self.weights = weights


class MixedStreamCursor(Cursor):
    """Walks through a mixture of streams, each part in an order and with a buffer of its own.

    Shares are of the rows that are not dropped, and so are positions.

    Args:
        stream: is given the rows that are drawn.
        seed: changes every order.
    """

    def __init__(self, stream: MixedStream, seed: int) -> None:
        super().__init__(0, seed)
        self._stream = stream
        self._turns = Turns(stream.weights.values(), seed)
        self._cursors = [cursor(part, seed + number * APART) for number, part in enumerate(stream.parts.values(), 1)]

    def take(self, number: int, weights: Tensor | None = None) -> list[tuple[int, int]]:
        """See `StreamCursor.take`."""
        assert weights is None, "rows that nobody knows have no weights"
        start, self.position = self.position, self.position + number
        turns = [self._turns[position][0] for position in range(start, self.position)]
        for part, one in enumerate(self._cursors):
            one.take(turns.count(part))
        names, rows = list(self._stream.parts), [iter(part.drawn.values()) for part in self._stream.parts.values()]
        self._stream.drawn = {place: named(next(rows[part]), names[part]) for place, part in enumerate(turns, start)}
        return [(position, position) for position in self._stream.drawn]

    def state_dict(self) -> dict[str, Any]:
        """Where each part is."""
        return super().state_dict() | {"parts": [part.state_dict() for part in self._cursors]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for part, own in zip(self._cursors, state["parts"], strict=True):
            part.load_state_dict(own)


def cursor(rows: Rows, seed: int) -> Cursor:
    """The order in which rows are drawn: by epochs of all, by the shares of a mixture, or as they come."""
    if isinstance(rows, MixedStream):
        return MixedStreamCursor(rows, seed)
    if isinstance(rows, Stream):
        return StreamCursor(rows, seed)
    return MixedCursor(rows, seed) if isinstance(rows, Mixed) else Cursor(len(rows), seed)
