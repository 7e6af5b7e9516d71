"""Shapings that normalise scores by moments of many rows. Moments are computed in float64.

Where a standard deviation is 0 up to rounding, nothing is divided, and a centred score is exactly 0: otherwise the
rounding errors of equal scores would become advantages.
"""

import math
from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.advantage.whiten import deviations, moments
from rft.algorithm.registries import SHAPINGS, AllSum
from rft.algorithm.scores.groups import ROUNDING, group_statistics

EPSILON = 1e-6


class RunningMoments:
    """Moments of all numbers of a run so far, in float64; parts are merged as in Chan et al., 1979.

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


def _idle(center: bool, scale: bool) -> str | None:
    """The fault of options that change no score."""
    if center or scale:
        return None
    return "scale=false: with center=false it changes nothing; set one of them to true, or take the shaping out"


@SHAPINGS.register("running_norm", state=RunningMoments, fault=_idle)
def running_norm(
    scores: Tensor, batch: TensorDict, *, all_sum: AllSum, state: RunningMoments, center: bool, scale: bool
) -> Tensor:
    """(R - mean) / (std + 1e-6), moments of all steps so far on all ranks, with this step. (B,) -> (B,)

    The standard deviation has ddof 1. The moments are part of a checkpoint.

    Args:
        center: subtracts the mean.
        scale: divides by the standard deviation.
    """
    state.update(*(float(number) for number in deviations(scores, _every(scores), all_sum)))
    return normalized(scores, state.mean, state.std, center, scale)


@SHAPINGS.register("batch_norm", fault=_idle)
def batch_norm(scores: Tensor, batch: TensorDict, *, all_sum: AllSum, center: bool, scale: bool) -> Tensor:
    """(R - mean) / (std + 1e-6), moments of the step on all ranks, std with ddof 1. (B,) -> (B,)

    Args:
        center: subtracts the mean.
        scale: divides by the standard deviation.
    """
    mean, variance = moments(scores, _every(scores), all_sum)
    return normalized(scores, mean, variance.sqrt(), center, scale)


@SHAPINGS.register("group_norm", fault=_idle)
def group_norm(scores: Tensor, batch: TensorDict, *, center: bool, scale: bool) -> Tensor:
    """(R - mean) / (std + 1e-6), moments of the rows of the prompt, std with ddof 1. (B,) -> (B,)

    A group of one is not divided.

    Args:
        center: subtracts the mean.
        scale: divides by the standard deviation.
    """
    group = group_statistics(scores, batch["group"])
    return normalized(scores, group.mean, group.std, center, scale)


def normalized(scores: Tensor, mean: Tensor | float, std: Tensor | float, center: bool, scale: bool) -> Tensor:
    """The scores less their mean, divided by std + 1e-6; (N,) in the dtype of the scores.

    Args:
        scores: (N,).
        mean, std: float64, of each score (N,) or of all of them.
        center: whether the mean is subtracted.
        scale: whether the standard deviation divides.
    """
    mean, std = (torch.as_tensor(moment, dtype=torch.float64, device=scores.device) for moment in (mean, std))
    equal = std <= ROUNDING * mean.abs()
    shaped = torch.where(equal, 0.0, scores.double() - mean) if center else scores.double()
    return (shaped / torch.where(equal, 1.0, std + EPSILON) if scale else shaped).to(scores.dtype)


def _every(scores: Tensor) -> Tensor:
    return torch.ones_like(scores, dtype=torch.bool)
