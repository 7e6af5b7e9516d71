"""The order in which rows are drawn: a permutation per epoch, the same whatever the number of ranks."""

import torch


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

    def take(self, number: int) -> list[tuple[int, int]]:
        """The next (position, row) pairs; positions count all draws of the run and never repeat."""
        taken = []
        for position in range(self.position, self.position + number):
            epoch, place = divmod(position, self._count)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
                self._order = torch.randperm(self._count, generator=generator).tolist()
                self._epoch = epoch
            taken.append((position, self._order[place]))
        self.position += number
        return taken
