"""Samplers: the order in which rows are drawn. It depends on seed, rows and `data.shuffle`, not on the ranks."""

from collections.abc import Iterable
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor
from typing import Any

import torch
from torch import Tensor

from rft.batch.counter_rng import generator
from rft.data.rows.lazy import Rows
from rft.data.rows.mixture import Mixed, MixedStream, named
from rft.data.rows.stream import RowStream

PART_SEEDS = 1_000_000_007  # distance between the seeds, or the first epochs, of two parts of a mixture


class RowSampler:
    """Draws rows of one data set without end: in epochs, by weight, or in the order of a stream.

    Attributes:
        position: draws so far, including skipped ones. It may be set if the rows are not a stream.

    Args:
        rows: the rows of the data set. No other sampler may use a stream.
        seed: determines every order.
        shuffle: `data.shuffle`; false: every epoch has the rows in their own order.
        first_epoch: number of the first epoch; it changes the shuffled order of rows that are not a stream.
    """

    def __init__(self, rows: Rows, seed: int, shuffle: bool = True, first_epoch: int = 0) -> None:
        self.position = 0
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._first_epoch = first_epoch
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)
        if isinstance(rows, RowStream):
            rows.start(seed, shuffle)

    def take(self, number: int, weights: Tensor | None = None) -> list[tuple[int, int]]:
        """The next (position, row) pairs. Positions count all draws of the run and never repeat.

        Args:
            number: how many to draw.
            weights: (N,), at least one above 0. Rows of weight 0 are skipped, and so are their positions. None for
                rows of a stream.

        Raises:
            ValueError: a row of a stream is malformed, or a stream dropped all rows of an epoch.
        """
        if isinstance(self._rows, RowStream):
            assert weights is None, "rows of a stream have no weights"
            positions = self._rows.take(number)
            self.position = self._rows.position
            return [(position, position) for position in positions]
        assert weights is None or weights.any(), "no row has weight"
        taken: list[tuple[int, int]] = []
        while len(taken) < number:
            row = self.row_at(self.position)
            if weights is None or weights[row] != 0:
                taken.append((self.position, row))
            self.position += 1
        return taken

    def row_at(self, position: int) -> int:
        """The row at a position of the epochs."""
        epoch, index = divmod(position, len(self._rows))
        if not self._shuffle:
            return index
        if epoch != self._epoch:
            shuffle = generator(self._seed, self._first_epoch + epoch)
            self._order = torch.randperm(len(self._rows), generator=shuffle)
            self._epoch = epoch
        return int(self._order[index])

    def take_by_weight(self, number: int, weights: Tensor) -> list[tuple[int, int]]:
        """The next (position, row) pairs, drawn by weight, without epochs.

        Rows are drawn without replacement, with probabilities proportional to the weights of the remaining rows. When
        none remain, all rows are available again.

        Args:
            number: how many to draw.
            weights: (N,) float64, at least one above 0. Rows of weight 0 are not drawn.
        """
        candidates = int((weights > 0).sum())
        assert candidates > 0, "no row has weight"
        taken: list[tuple[int, int]] = []
        while len(taken) < number:
            draws = torch.rand(len(self._rows), generator=generator(self._seed, self.position), dtype=torch.float64)
            # sorting exponential variables with the weights as rates gives weighted draws without replacement
            times = torch.where(weights > 0, -torch.log1p(-draws) / weights, torch.inf)
            count = min(candidates, number - len(taken))
            chosen = times.argsort(stable=True)[:count].tolist()
            taken += zip(range(self.position, self.position + count), chosen, strict=True)
            self.position += count
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The position, and the number of rows or the state of a stream."""
        own = self._rows.state_dict() if isinstance(self._rows, RowStream) else {"rows": len(self._rows)}
        return {"position": self.position} | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of `state_dict`.

        Raises:
            ValueError: there is another number of rows, which would come in another order.
        """
        if isinstance(self._rows, RowStream):
            self._rows.load_state_dict(state)
        elif (before := state["rows"]) != len(self._rows):
            raise ValueError(
                f"data.train has {len(self._rows)} rows, and had {before} when the checkpoint was written, so they "
                "would come in another order; restore the rows, or set resume=never to start again"
            )
        self.position = state["position"]


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
            mixed = isinstance(rows, Mixed)
            self._parts.append(RowSampler(part, seed if mixed else seed + apart, shuffle, apart if mixed else 0))

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


def make_sampler(rows: Rows, seed: int, shuffle: bool) -> RowSampler:
    """The sampler for the rows of a mixture or of one data set."""
    if isinstance(rows, (Mixed, MixedStream)):
        return MixtureSampler(rows, seed, shuffle)
    return RowSampler(rows, seed, shuffle)
