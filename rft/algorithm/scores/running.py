"""Mean and standard deviation of a stream of numbers, kept over the steps of a run."""

import math
from collections.abc import Mapping


class RunningMoments:
    """Moments of all numbers so far, in float64; parts are merged as in Chan et al., 1979.

    Attributes:
        count: how many.
        mean: 0 before the first.
        squares: sum of the squared deviations from the mean.
    """

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0

    def update(self, count: float, mean: float, squares: float) -> None:
        """Adds numbers of which the same moments are known; `count` may be 0."""
        total = self.count + count
        if total == 0:
            return
        gap = mean - self.mean
        self.squares += squares + gap**2 * self.count * count / total
        self.mean += gap * count / total
        self.count = total

    @property
    def std(self) -> float:
        """The standard deviation with ddof 1; 0 of a single number."""
        return math.sqrt(self.squares / max(self.count - 1, 1))

    def numbers(self) -> dict[str, float]:
        """What a step logs."""
        return {"mean": self.mean, "std": self.std}

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what `state_dict` returned."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
