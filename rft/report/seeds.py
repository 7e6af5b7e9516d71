"""Statistics over runs that differ in the seed alone: mean, standard deviation, paired differences. No file access."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from rft.logger.history import STDERR, History, Point

# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; for more the last is used, which is slightly wide
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
MEASURED = ("time/", "throughput/", "memory/")  # differ between equal runs


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (divisor n - 1); the deviation of one value is 0."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def paired_difference(
    baseline: Mapping[str, float], other: Mapping[str, float]
) -> tuple[float, float | None, int] | None:
    """`other - baseline` over the seeds that both have: mean, half of its 95 % t interval, number of pairs.

    The interval of one pair is None; without a pair the result is None.
    """
    pairs = [other[seed] - baseline[seed] for seed in other if seed in baseline]
    if not pairs:
        return None
    mean, deviation = mean_std(pairs)
    if len(pairs) == 1:
        return mean, None, 1
    quantile = T_QUANTILES[min(len(pairs) - 1, len(T_QUANTILES)) - 1]
    return mean, quantile * deviation / math.sqrt(len(pairs)), len(pairs)


def mean_curve(histories: Sequence[History], name: str) -> tuple[list[Point], list[float | None]]:
    """Mean of a metric at each step that all histories have, and the standard deviation there."""
    every = [dict(history.points(name)) for history in histories]
    points: list[Point] = []
    deviations: list[float | None] = []
    for step in sorted(set.intersection(*(set(points) for points in every))):
        values = [value for points in every if (value := points[step]) is not None]
        complete = len(values) == len(every)
        mean, deviation = mean_std(values) if complete else (None, None)
        points.append((step, mean))
        deviations.append(deviation)
    return points, deviations


def last_common_step(histories: Sequence[History]) -> int | None:
    """The last step before the first that differs between the histories; None if no step differs or the first does.

    Times, throughput and memory are not compared.
    """
    every = [[_compared(row) for row in history.rows()] for history in histories]
    common = None
    for rows in zip(*every, strict=False):
        if any(row != rows[0] for row in rows):
            return common
        common = rows[0]["step"]
    return common if len({len(rows) for rows in every}) > 1 else None


def _compared(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith(MEASURED) and not name.endswith(STDERR)}
