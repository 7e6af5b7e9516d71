"""Exact global means: a metric is a pair (sum, weight) until every micro-batch of every rank has been added."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Metrics:
    """Collects the numbers of one step.

    `reduce` gathers the pairs of all ranks, so a mean is the mean over all rows or tokens of the step, however they
    were spread over micro-batches and ranks.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[float | Tensor, float | Tensor]] = {}
        self._largest: dict[str, float] = {}

    def add(self, name: str, total: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Adds to the sum and to the weight of a mean. Tensors stay where they are until `reduce`."""
        before = self._pairs.get(name, (0.0, 0.0))
        self._pairs[name] = (before[0] + total, before[1] + weight)

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds values, or those of them under the mask, with weight one each."""
        values = values.detach().double()
        if mask is None:
            self.add(name, values.sum(), values.numel())
        else:
            self.add(name, torch.where(mask, values, 0.0).sum(), mask.sum())

    def largest(self, name: str, value: float | Tensor) -> None:
        """Keeps the largest value over the step and over all ranks."""
        self._largest[name] = max(self._largest.get(name, float("-inf")), float(value))

    @contextmanager
    def timer(self, stage: str) -> Iterator[None]:
        """Adds the seconds of the block to `time/<stage>_s`; of several ranks the slowest counts."""
        start = time.perf_counter()
        try:
            yield
        finally:
            name = f"time/{stage}_s"
            self._largest[name] = self._largest.get(name, 0.0) + time.perf_counter() - start

    def reduce(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """The numbers of the step over all ranks.

        Args:
            gather: returns the list of what each rank handed in, on every rank.
        """
        pairs: dict[str, tuple[float, float]] = {}
        largest: dict[str, float] = {}
        mine = {name: (float(total), float(weight)) for name, (total, weight) in self._pairs.items()}
        for theirs, peaks in gather((mine, self._largest)):
            for name, (total, weight) in theirs.items():
                before = pairs.get(name, (0.0, 0.0))
                pairs[name] = (before[0] + total, before[1] + weight)
            for name, value in peaks.items():
                largest[name] = max(largest.get(name, float("-inf")), value)
        means = {name: total / weight for name, (total, weight) in pairs.items() if weight > 0}
        return means | largest
