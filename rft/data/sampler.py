"""The order in which rows are drawn, the same whatever the number of ranks: by epochs, or by weight."""

from typing import Any

import torch
from torch import Tensor


class Cursor:
    """Walks through shuffled epochs without end.

    Args:
        count: number of rows.
        seed: changes every permutation.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.position = 0
        self._count = count
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.position = state["position"]

    def take(self, number: int, weights: Tensor | None = None) -> list[tuple[int, int]]:
        """The next (position, row) pairs; positions count all draws of the run and never repeat.

        Args:
            number: how many.
            weights: (N,); rows of weight 0 are passed over, and so are their positions. At least one has weight.
        """
        passed = set() if weights is None else set((weights == 0).nonzero().flatten().tolist())
        assert len(passed) < self._count, "no row has weight"
        taken: list[tuple[int, int]] = []
        while len(taken) < number:
            if (row := self._row(self.position)) not in passed:
                taken.append((self.position, row))
            self.position += 1
        return taken

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, self._count)
        if epoch != self._epoch:
            self._order = torch.randperm(self._count, generator=generator(self._seed, epoch)).tolist()
            self._epoch = epoch
        return self._order[place]


class Lottery(Cursor):
    """Draws rows by weight, without epochs."""

    def take(self, number: int, weights: Tensor | None = None) -> list[tuple[int, int]]:
        """The next (position, row) pairs; positions count all draws of the run and never repeat.

        One row after the other is drawn with a chance in proportion to its weight among those that are left; when none
        is left, all of them are put back.

        Args:
            number: how many.
            weights: (N,) float64, at least one above 0, or None where all are equal. Rows of weight 0 are not drawn.
        """
        weights = torch.ones(self._count, dtype=torch.float64) if weights is None else weights
        tickets = int((weights > 0).sum())
        assert tickets > 0, "no row has weight"
        taken: list[tuple[int, int]] = []
        while len(taken) < number:
            draws = torch.rand(self._count, generator=generator(self._seed, self.position), dtype=torch.float64)
            # The first of exponential clocks with these rates to ring is a draw by weight; so is each that follows.
            rings = torch.where(weights > 0, -torch.log1p(-draws) / weights, torch.inf)
            count = min(tickets, number - len(taken))
            chosen = rings.argsort(stable=True)[:count].tolist()
            taken += zip(range(self.position, self.position + count), chosen, strict=True)
            self.position += count
        return taken


def generator(seed: int, number: int) -> torch.Generator:
    """Of the random numbers of one epoch, or whatever else is counted."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)
