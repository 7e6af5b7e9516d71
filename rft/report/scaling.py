"""Extrapolates the accuracy of a run: the sigmoid of accuracy against compute (ScaleRL, 2510.13786, equation 1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rft.logger.history import History, short

FEWEST = 5  # evaluations that a fit needs
GRID = 15  # grid points in each direction of a search round
ROUNDS, ZOOM = 32, 0.7  # each round searches a smaller window around the best shape so far


@dataclass(frozen=True)
class ScalingCurve:
    """R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B).

    Attributes:
        start: R0, the accuracy before the first step.
        asymptote: A, the limit for infinite compute.
        midpoint: C_mid, the compute at half of the gain.
        efficiency: B, the steepness of the rise.
        error: root mean square distance of the points from the curve.
    """

    start: float
    asymptote: float
    midpoint: float
    efficiency: float
    error: float

    def __call__(self, compute: float) -> float:
        """The accuracy after this compute, which is above 0."""
        return self.start + (self.asymptote - self.start) / (1 + (self.midpoint / compute) ** self.efficiency)


def fit(points: Sequence[tuple[float, float]], start: float) -> ScalingCurve | None:
    """Least squares with A in 0 .. 1 and B in 0.1 .. 10.

    C_mid lies between a tenth of the first C and ten times the last. Given C_mid and B, the best A has a closed form;
    the two are searched on a shrinking grid of their logarithms.

    Args:
        points: (compute above 0, accuracy).
        start: R0.

    Returns:
        None if there are too few points, or all are equal to R0, where every curve fits.
    """
    if len(points) < FEWEST or all(accuracy == start for _, accuracy in points):
        return None
    low, high = min(compute for compute, _ in points) / 10, max(compute for compute, _ in points) * 10
    middle, steep = (math.log(low) + math.log(high)) / 2, 0.0
    reaches = [(math.log(high) - math.log(low)) / 2, math.log(10)]
    for number in range(ROUNDS):
        across, along = (
            [centre + reach * ZOOM**number * (2 * place / (GRID - 1) - 1) for place in range(GRID)]
            for centre, reach in zip((middle, steep), reaches, strict=True)
        )
        curves = [
            _best(points, start, min(max(math.exp(m), low), high), min(max(math.exp(s), 0.1), 10.0))
            for m in across
            for s in along
        ]
        best = min(curves, key=lambda curve: curve.error)
        middle, steep = math.log(best.midpoint), math.log(best.efficiency)
    return best


def _best(points: Sequence[tuple[float, float]], start: float, midpoint: float, efficiency: float) -> ScalingCurve:
    """The least-squares curve for a given midpoint and efficiency."""
    shape = [1 / (1 + (midpoint / compute) ** efficiency) for compute, _ in points]
    gains = [accuracy - start for _, accuracy in points]
    gain = sum(s * g for s, g in zip(shape, gains, strict=True)) / sum(s * s for s in shape)
    gain = min(max(gain, -start), 1 - start)
    squares = sum((gain * s - g) ** 2 for s, g in zip(shape, gains, strict=True))
    return ScalingCurve(start, start + gain, midpoint, efficiency, math.sqrt(squares / len(points)))


def scaling_fit(history: History) -> list[str]:
    """The asymptote of each accuracy of the last stage: one line for each held-out set with enough evaluations.

    Compute is measured in steps of the stage, which cost about the same.
    """
    lines = []
    for name in history.names:
        if not (name.startswith("eval/") and name.endswith("/accuracy")):
            continue
        begin = history.stages()[-1].start
        points = [(float(step - begin), value) for step, value in history.points(name) if value is not None]
        before = [value for step, value in points if step <= 0]
        curve = fit([point for point in points if point[0] > 0], before[-1]) if before else None
        if curve is not None:
            lines.append(
                f"{name} tends to {short(curve.asymptote, 3)}: half of the gain by step {short(curve.midpoint, 3)} of "
                f"the stage, efficiency {short(curve.efficiency, 3)}, fitted to within {short(curve.error, 2)}"
            )
    return lines
