"""How far a run would get: the sigmoid of accuracy against compute (ScaleRL, 2510.13786, equation 1)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rft.report.history import History, short

FEWEST = 5  # evaluations that are fitted
GRID = 15  # shapes in each direction that a round of the search looks at
ROUNDS, ZOOM = 32, 0.7  # each round looks around the best shape so far, in a smaller window


@dataclass(frozen=True)
class ScalingCurve:
    """R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B).

    Attributes:
        start: R0, the accuracy before the first step.
        asymptote: A, what more compute tends to.
        midpoint: C_mid, the compute of half of the gain.
        efficiency: B, how steeply accuracy rises.
        error: root mean square distance of the points from the curve.
    """

    start: float
    asymptote: float
    midpoint: float
    efficiency: float
    error: float

    def __call__(self, compute: float) -> float:
        """The accuracy after so much compute, above 0."""
        return self.start + (self.asymptote - self.start) / (1 + (self.midpoint / compute) ** self.efficiency)


def fit(points: Sequence[tuple[float, float]], start: float) -> ScalingCurve | None:
    """The curve of least squares with A in 0 .. 1, B in 0.1 .. 10.

    C_mid is at least a tenth of the first C and at most ten times the last. The best A for a C_mid and a B is known;
    these two are searched for on a grid of their logarithms that closes in.

    Args:
        points: (compute above 0, accuracy).
        start: R0.

    Returns:
        None where the points are too few, or none has left R0: then every curve would do.
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
    """The curve of least squares of this shape."""
    shape = [1 / (1 + (midpoint / compute) ** efficiency) for compute, _ in points]
    gains = [accuracy - start for _, accuracy in points]
    gain = sum(s * g for s, g in zip(shape, gains, strict=True)) / sum(s * s for s in shape)
    gain = min(max(gain, -start), 1 - start)
    squares = sum((gain * s - g) ** 2 for s, g in zip(shape, gains, strict=True))
    return ScalingCurve(start, start + gain, midpoint, efficiency, math.sqrt(squares / len(points)))


def scaling_fit(history: History) -> list[str]:
    """What the accuracies of the last stage tend to, a line for each held-out set of which that can be said.

    Compute is counted in steps of the stage, which cost about the same.
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
