"""What happens to the score of a row before an advantage is computed from it.

Some shapings normalise scores by moments of many rows, which are computed in float64. Where a standard deviation is 0
up to rounding, nothing is divided, and a centred score is exactly 0: otherwise the rounding errors of equal scores
would become advantages.
"""

import math
from collections.abc import Mapping
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import SHAPINGS, AllSum
from rft.algorithm.scores.groups import ROUNDING, dense_numbers, group_statistics
from rft.algorithm.statistics import deviations, moments
from rft.ranges import Fraction, NonNegativeFloat, PositiveInt

LengthOf = Literal["answer", "episode"]


def _lengths(batch: TensorDict, of: LengthOf) -> Tensor:
    """Trained tokens of the longest answer of each row, or of all its answers (`episode`), (B,) int64.

    Without the column `turn` a row is one answer. Shaping comes before any filter, so they are those of `response_mask`
    and not of `loss_mask`.
    """
    trains = batch["response_mask"]
    if of == "episode" or "turn" not in batch.keys():
        return trains.sum(dim=1)
    turn = batch["turn"]
    size = (len(turn), 1 + (int(turn.max()) if turn.numel() else 0))
    return trains.new_zeros(size, dtype=torch.int64).scatter_add(1, turn, trains.long()).amax(dim=1)


@SHAPINGS.register("overlong")
def overlong(
    scores: Tensor,
    batch: TensorDict,
    *,
    of: LengthOf,
    max_tokens: PositiveInt,
    buffer: Fraction,
    factor: NonNegativeFloat,
) -> Tensor:
    """Adds factor * clip(-(L - (max - b)) / b, -1, 0), L trained tokens, b = buffer * max. (B,) -> (B,)

    The soft overlong punishment of DAPO, arXiv 2503.14476, equation 13.

    Args:
        of: L is that of the longest answer of an episode, or of all its answers.
        max_tokens: length at which the penalty is complete.
        buffer: share of `max_tokens` before it over which the penalty grows from 0; 0 punishes only what is longer.
        factor: the complete penalty.
    """
    length = _lengths(batch, of)
    ramp = buffer * max_tokens
    excess = (length - (max_tokens - ramp)) / max(ramp, 1)
    return scores - factor * excess.clamp(0, 1).to(scores.dtype)


@SHAPINGS.register("truncated", reads=("truncated",))
def truncated(scores: Tensor, batch: TensorDict, *, factor: float, offset: float) -> Tensor:
    """factor * R + offset for the rows that the length limit ended; the others keep their score. (B,) -> (B,)"""
    return torch.where(batch["truncated"], factor * scores + offset, scores)


def _bounds(low: float, high: float) -> str | None:
    return None if low < high else f"low={low}: it must be below high={high}"


@SHAPINGS.register("clip_scores", fault=_bounds)
def clip_scores(scores: Tensor, batch: TensorDict, *, low: float, high: float) -> Tensor:
    """clip(R, low, high), before any baseline. (B,) -> (B,)"""
    return scores.clamp(low, high)


@SHAPINGS.register("cosine_length", reads=("terms",))
def cosine_length(
    scores: Tensor,
    batch: TensorDict,
    *,
    term: str,
    of: LengthOf,
    max_tokens: PositiveInt,
    right_short: float,
    right_long: float,
    wrong_short: float,
    wrong_long: float,
    at_limit: float | None,
) -> Tensor:
    """Adds long + (short - long) * (1 + cos(pi min(L, max) / max)) / 2, L trained tokens. (B,) -> (B,)

    The cosine reward of arXiv 2502.03373, section 4.2. `short` and `long` are those of right or of wrong answers. It is
    the score itself where the term has the weight 0. A row that the term does not score keeps its score.

    Args:
        term: the reward term, before any shaping, that is above 0 where an answer is right.
        of: L is that of the longest answer of an episode, or of all its answers.
        max_tokens: length at which the value is `long`.
        right_short, right_long: values of a right answer of no and of `max_tokens` tokens.
        wrong_short, wrong_long: those of a wrong answer.
        at_limit: the value from `max_tokens` on, right or wrong; None: that of the cosine.
    """
    value, length = batch["terms", term], _lengths(batch, of)
    short = torch.where(value > 0, right_short, wrong_short).double()
    long = torch.where(value > 0, right_long, wrong_long).double()
    wave = (1 + torch.cos(math.pi * (length.double() / max_tokens).clamp(max=1))) / 2
    added = long + (short - long) * wave
    if at_limit is not None:
        added = torch.where(length >= max_tokens, at_limit, added)
    return scores + torch.where(value.isnan(), 0.0, added).to(scores.dtype)


@SHAPINGS.register("kimi_length", reads=("terms",))
def kimi_length(scores: Tensor, batch: TensorDict, *, term: str, factor: NonNegativeFloat) -> Tensor:
    """Adds factor * l to right and factor * min(0, l) to wrong answers, l = 0.5 - (L - min) / (max - min). (B,) -> (B,)

    The length penalty of Kimi k1.5, arXiv 2501.12599, section 2.3.3. L are the trained tokens of the row, of an episode
    those of all its answers; min and max are the smallest and the largest L in its group. Where these are equal,
    nothing is added. A row that the term does not score keeps its score.

    Args:
        term: the reward term, before any shaping, that is above 0 where an answer is right.
        factor: weight of the penalty.
    """
    value, length = batch["terms", term], _lengths(batch, "episode").double()
    index, bounds = dense_numbers(batch["group"]), torch.zeros_like(length)
    least = bounds.scatter_reduce(0, index, length, "amin", include_self=False)[index]
    span = bounds.scatter_reduce(0, index, length, "amax", include_self=False)[index] - least
    added = 0.5 - (length - least) / span  # NaN where all lengths are equal
    added = torch.where(value > 0, added, added.clamp(max=0))
    return scores + torch.where((span == 0) | value.isnan(), 0.0, factor * added).to(scores.dtype)


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
    state.update(*(float(number) for number in deviations(scores, None, all_sum)))
    return normalized(scores, state.mean, state.std, center, scale)


@SHAPINGS.register("batch_norm", fault=_idle)
def batch_norm(scores: Tensor, batch: TensorDict, *, all_sum: AllSum, center: bool, scale: bool) -> Tensor:
    """(R - mean) / (std + 1e-6), moments of the step on all ranks, std with ddof 1. (B,) -> (B,)

    Args:
        center: subtracts the mean.
        scale: divides by the standard deviation.
    """
    mean, variance = moments(scores, None, all_sum)
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
