"""Samplers: the order in which rows are drawn. It depends on seed, rows and `data.shuffle`, not on the ranks."""

from typing import Any

import torch
from torch import Tensor

from rft.batch.counter_rng import generator
from rft.data.rows.base import OwnOrder
from rft.data.rows.lazy import Rows


class RowSampler:
    """Draws rows of one data set without end: in epochs, or by weight.

    Attributes:
        position: draws so far, including skipped ones. It may be set if the rows are not a stream.

    Args:
        rows: the rows of the data set.
        seed: determines every order.
        shuffle: `data.shuffle`; false: every epoch has the rows in their own order.
        first_epoch: number of the first epoch; it changes their shuffled order.
    """

    def __init__(self, rows: Rows, seed: int, shuffle: bool = True, first_epoch: int = 0) -> None:
        self.position = 0
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._first_epoch = first_epoch
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def take(self, number: int, weights: Tensor | None = None) -> list[tuple[int, int]]:
        """The next (position, row) pairs. Positions count all draws of the run and never repeat.

        Args:
            number: how many to draw.
            weights: (N,), at least one above 0. Rows of weight 0 are skipped, and so are their positions. None for
                rows of a stream.
        """
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
        """The position, and the number of rows."""
        return {"position": self.position, "rows": len(self._rows)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state of `state_dict`.

        Raises:
            ValueError: there is another number of rows, which would come in another order.
        """
        if (before := state["rows"]) != len(self._rows):
            raise ValueError(
                f"data.train has {len(self._rows)} rows, and had {before} when the checkpoint was written, so they "
                "would come in another order; restore the rows, or set resume=never to start again"
            )
        self.position = state["position"]


def make_sampler(rows: Rows, seed: int, shuffle: bool) -> RowSampler:
    """The sampler of the rows themselves if they have an order of their own, or else a `RowSampler`."""
    if isinstance(rows, OwnOrder):
        sampler: RowSampler = rows.sampler(seed, shuffle)
        return sampler
    return RowSampler(rows, seed, shuffle)
