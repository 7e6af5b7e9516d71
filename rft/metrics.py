"""Exact global means: a metric stays a pair (sum, weight) until the pairs of all micro-batches and ranks are added."""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

TIMES = "time/"  # the names of timers begin with it
ReadNote = Callable[[list[float]], tuple[float, dict[str, Any]] | None]


class Metrics:
    """Collects the numbers of one step.

    `reduce` adds the pairs of all ranks. A mean is thus over all rows or tokens of the step and does not depend on
    micro-batches or ranks.
    """

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[float | Tensor, ...]] = {}
        self._weights: dict[str, tuple[float | Tensor, ...]] = {}  # (count, sum, sum of squares)
        self._largest: dict[str, float | Tensor] = {}
        self._counts: dict[str, int] = {}
        self._moments: dict[str, list[tuple[int, float, float]]] = {}  # (count, mean, squared deviations from it)
        self._notes: dict[ReadNote, list[Tensor]] = {}  # tables that stay on their device

    def add(self, name: str, total: float | Tensor, weight: float | Tensor = 1.0) -> None:
        """Adds to the sum and to the weight of a mean. Tensors stay on their device until `reduce`."""
        _add(self._pairs, name, (total, weight))

    def mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds values with weight 1 each; with a mask, only the masked-in ones."""
        values = values.detach().double()
        if mask is None:
            self.add(name, values.sum(), values.numel())
        else:
            self.add(name, torch.where(mask, values, 0.0).sum(), mask.sum())

    def largest(self, name: str, value: float | Tensor) -> None:
        """Keeps the largest value over the step and over all ranks. Tensors stay on their device until `reduce`."""
        before = self._largest.get(name, float("-inf"))
        if isinstance(value, Tensor):
            value = value.detach().double()
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            self._largest[name] = torch.maximum(before.to(value.device), value)
        elif isinstance(value, Tensor):
            self._largest[name] = value.clamp(min=before)  # a number becomes no tensor: a GPU would wait for its copy
        elif isinstance(before, Tensor):
            self._largest[name] = before.clamp(min=value)
        else:
            self._largest[name] = max(before, value)

    def count(self, name: str, number: int) -> None:
        """Adds to a number that is summed over the step and over all ranks."""
        self._counts[name] = self._counts.get(name, 0) + number

    def deviation(self, name: str, values: Tensor) -> None:
        """Adds values to a standard deviation (ddof 1) over the step and over all ranks."""
        values = values.detach().double()
        if len(values):  # an empty tensor has no mean
            mean = float(values.mean())
            part = (len(values), mean, float((values - mean).square().sum()))
            self._moments.setdefault(name, []).append(part)

    def include(self, other: "Metrics") -> None:
        """Adds what another table has collected, without the seconds of its timers: they ran beside those of this one.

        Args:
            other: without notes.
        """
        assert not other._notes, "notes of single tokens belong to one step"
        for sums, added in ((self._pairs, other._pairs), (self._weights, other._weights)):
            for name, part in added.items():
                _add(sums, name, part)
        for name, value in other._largest.items():
            if not name.startswith(TIMES):
                self.largest(name, value)
        for name, number in other._counts.items():
            self.count(name, number)
        for name, parts in other._moments.items():
            self._moments.setdefault(name, []).extend(parts)

    def effective_share(self, name: str, weights: Tensor, mask: Tensor) -> None:
        """Adds weights to an effective sample size, as a share of all samples: (mean w)^2 / mean w^2."""
        weights = torch.where(mask, weights.detach().double(), 0.0)
        _add(self._weights, name, (mask.sum(), weights.sum(), weights.square().sum()))

    def notes(self, table: Tensor, read: ReadNote) -> None:
        """Keeps records about single tokens; see `largest_notes`. The table stays on its device until then.

        Args:
            table: (W, C) float64, a record a row.
            read: from the C numbers of a row to the size of the record and the record; None drops it.
        """
        self._notes.setdefault(read, []).append(table.detach())

    def largest_notes(self, count: int, gather: Callable[[Any], list[Any]]) -> list[dict[str, Any]]:
        """The largest notes of all ranks, largest first; `gather` as in `reduce`."""
        found = [read(row) for read, tables in self._notes.items() for row in torch.cat(tables).tolist()]
        own = _largest([note for note in found if note is not None], count)
        all_notes = [note for rank_values in gather(own) for note in rank_values]
        return [note for _, note in _largest(all_notes, count)]

    @contextmanager
    def timer(self, stage: str) -> Iterator[None]:
        """Adds the seconds of the block to `time/<stage>_s` (maximum over ranks) and labels it for the profiler."""
        start = time.perf_counter()
        try:
            with record_function(stage):
                yield
        finally:
            name = f"{TIMES}{stage}_s"
            self._largest[name] = float(self._largest.get(name, 0.0)) + time.perf_counter() - start

    @contextmanager
    def unless(self, error: type[Exception]) -> Iterator[None]:
        """Drops what the block has added if it raises this error."""
        before = {name: _copied(table) for name, table in vars(self).items()}
        try:
            yield
        except error:
            vars(self).update(before)
            raise

    def reduce(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """The numbers of the step over all ranks.

        Args:
            gather: `World.gather`: the argument of every rank, on every rank.
        """
        single: dict[str, tuple[float | Tensor, ...]] = {name: (value,) for name, value in self._largest.items()}
        *local_sums, local_largest = _as_floats([self._pairs, self._weights, single])
        pairs: dict[str, tuple[float, ...]] = {}
        weights: dict[str, tuple[float, ...]] = {}
        largest: dict[str, float] = {}
        moments: dict[str, list[tuple[int, float, float]]] = {}
        counts: dict[str, float] = {}
        for rank_sums, rank_largest, rank_moments, rank_counts in gather(
            (local_sums, local_largest, self._moments, self._counts)
        ):
            for name, number in rank_counts.items():
                counts[name] = counts.get(name, 0.0) + number
            for sums, added in zip((pairs, weights), rank_sums, strict=True):
                for name, part in added.items():
                    _add(sums, name, part)
            for name, (value,) in rank_largest.items():
                largest[name] = max(largest.get(name, float("-inf")), value)
            for name, parts in rank_moments.items():
                moments.setdefault(name, []).extend(parts)
        means = {name: total / weight for name, (total, weight) in pairs.items() if weight > 0}
        shares = {name: total**2 / (n * squares) for name, (n, total, squares) in weights.items() if squares > 0}
        return means | shares | largest | counts | {name: _pooled(parts) for name, parts in moments.items()}


def _add(sums: dict[str, tuple[Any, ...]], name: str, part: tuple[Any, ...]) -> None:
    """Adds numbers to the entry of a name."""
    sums[name] = tuple(before + number for before, number in zip(sums.get(name, (0.0,) * len(part)), part, strict=True))


def _as_floats(tables: list[dict[str, tuple[float | Tensor, ...]]]) -> list[dict[str, tuple[float, ...]]]:
    """The tables with numbers in the place of tensors, which are copied from each device all at once."""
    tensors: dict[torch.device, list[Tensor]] = {}
    for number in (number for table in tables for part in table.values() for number in part):
        if isinstance(number, Tensor):
            tensors.setdefault(number.device, []).append(number.detach().double())
    copied = {device: iter(torch.stack(numbers).tolist()) for device, numbers in tensors.items()}

    def value(number: float | Tensor) -> float:
        return float(next(copied[number.device])) if isinstance(number, Tensor) else float(number)

    return [{name: tuple(map(value, part)) for name, part in table.items()} for table in tables]


def _copied(table: Any) -> Any:
    """A copy of a table or list; the lists in a table are copied too."""
    return {name: copy(entry) for name, entry in table.items()} if isinstance(table, dict) else copy(table)


def _largest(notes: list[tuple[float, dict[str, Any]]], count: int) -> list[tuple[float, dict[str, Any]]]:
    return sorted(notes, key=lambda note: note[0], reverse=True)[:count]


def _pooled(parts: list[tuple[int, float, float]]) -> float:
    """Standard deviation of all values together, from the moments of each part (Chan et al., 1979)."""
    count = sum(n for n, _, _ in parts)
    mean = sum(n * part_mean for n, part_mean, _ in parts) / count
    squares = sum(deviations + n * (part_mean - mean) ** 2 for n, part_mean, deviations in parts)
    return math.sqrt(squares / max(1, count - 1))


def add_tflops(metrics: Metrics, flops: list[float | None], seconds: float, peak_tflops: float | None) -> None:
    """Adds the speed of updates, and its share of the peak of the device, if every model counts its operations.

    Args:
        flops: operations of each update; None if its model does not count them.
        seconds: of all updates.
        peak_tflops: of the device; None if it is not known.
    """
    counted = [operations / 1e12 for operations in flops if operations is not None]
    if flops and len(counted) == len(flops):
        metrics.add("throughput/tflops", sum(counted), seconds)
        if peak_tflops is not None:
            metrics.add("throughput/mfu", sum(counted), seconds * peak_tflops)


def peak_gib(device: torch.device) -> float:
    """The most memory this process has held, in GiB: on the GPU where it computes there, resident otherwise."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
