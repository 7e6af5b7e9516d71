"""Variants of the clipped loss: with other bounds, of the log-ratio, and those that treat a few tokens of the whole
mini-batch differently from the others.
"""

import math
from typing import Annotated, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import LOSSES, AllSum, Gradient, Unreduced
from rft.algorithm.divergence import LARGEST_LOG_RATIO, k3, log_ratio, ratio
from rft.algorithm.loss.clip import clip_statistics, clipped, pessimistic, ppo_clip
from rft.algorithm.order_statistics import draws_of, exact_mean, largest, share_of, up_to_mean
from rft.ranges import ClipBound, Fraction, NonNegativeFloat, Range


def delta_inside(delta: float, clip_high: float) -> str | None:
    """The error message for a bound that the clip would hide, or None."""
    return f"delta={delta}: it must be at least 1 + clip_high" if delta < 1 + clip_high else None


@LOSSES.register(
    "two_sided",
    fault=delta_inside,
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("clip_low", "clip_high", "delta"),
    gradient=Gradient("exact"),
)
def two_sided(
    logprobs: Tensor, batch: TensorDict, *, clip_low: Fraction, clip_high: ClipBound, delta: float
) -> Unreduced:
    """max(-A min(r, delta), -A clip(r, 1 - low, 1 + high)) per token. INTELLECT-2, arXiv 2505.07291.

    Where A < 0 the ratio of `ppo_clip` is unbounded, and so is its loss; here delta bounds both. With delta >= 1 + high
    this is `ppo_clip` with the dual clip delta, and it is computed that way. Statistics as `ppo_clip`.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high].
        delta: the largest ratio outside the clip; at least 1 + high.
    """
    return ppo_clip(logprobs, batch, clip_low=clip_low, clip_high=clip_high, dual_clip=delta)


@LOSSES.register(
    "cpgd",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("clip_low", "clip_high"),
    gradient=Gradient("exact"),
)
def cpgd(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    clip_low: Annotated[float, Range(low=0, high=0.999)],
    clip_high: NonNegativeFloat,
) -> Unreduced:
    """max(-A l, -A clip(l, ln(1 - low), ln(1 + high))) per token, of the log-ratio l = ln r.

    CPGD, arXiv 2505.12504: the gradient is not multiplied by a ratio, so a large ratio does not inflate it; the same
    tokens are clipped as in `ppo_clip`. The paper adds the term `drift`. Statistics as `ppo_clip`.

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high].
    """
    difference = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    loss, low, high = pessimistic(difference, batch, math.log1p(-clip_low), math.log1p(clip_high))
    return loss, clip_statistics(low, high, difference)


def covariances(logprobs: Tensor, batch: TensorDict, all_sum: AllSum) -> Tensor:
    """(A - mean A) (lp - mean lp) of every trained token (B, T) float64, means over all trained tokens of all ranks.

    arXiv 2505.22617, section 4.2. Values outside `loss_mask` are undefined.
    """
    keep, advantages = batch["loss_mask"], batch["advantages"]
    mean_advantage = exact_mean(advantages, keep, all_sum)
    mean_logprob = exact_mean(logprobs, keep, all_sum)
    return (advantages.double() - mean_advantage) * (logprobs.double() - mean_logprob)


def select_clip_cov(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    all_sum: AllSum,
    seed: int,
    clip_low: float,
    clip_high: float,
    share: float,
    cov_low: float,
    cov_high: float,
) -> dict[str, Tensor]:
    """`cov_clipped` (B, T) bool: tokens drawn from those that the ratio does not clip and whose covariance fits."""
    keep = batch["loss_mask"]
    difference = log_ratio(logprobs, batch["old_logprobs"], keep)  # (B, T)
    _, clips = clipped(ratio(difference), difference, batch, clip_low, clip_high, dual_clip=None)
    free = keep & (clips["clip/low"] + clips["clip/high"] == 0)
    covariance = covariances(logprobs, batch, all_sum)
    fits = free & (covariance > cov_low) & (covariance < cov_high)
    draws = draws_of(batch, seed)
    return {"cov_clipped": largest(draws, fits, share_of(share, keep, all_sum), draws, all_sum)}


@LOSSES.register(
    "clip_cov",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("clip_low", "clip_high"),
    prepare=select_clip_cov,
    gradient=Gradient("near", cosine=0.991, note="exact except for dropped tokens, which are not random"),
)
def clip_cov(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    clip_low: Fraction,
    clip_high: ClipBound,
    share: Fraction,
    cov_low: float,
    cov_high: float,
) -> Unreduced:
    """`ppo_clip`, and 0 for a few tokens of high covariance, whose gradients lower the entropy most. Clip-Cov.

    arXiv 2505.22617, section 4.2. The covariance of a token is (A - mean A) (lp - mean lp), with means over all
    trained tokens of the mini-batch; tokens are drawn at random from those inside (cov_low, cov_high) whose ratio is
    not clipped. The weights of the others do not change.

    Statistics: as `ppo_clip`, and `clip/cov` (1 for a token that was drawn).

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high].
        share: of all trained tokens that are drawn, rounded down, at least one.
        cov_low, cov_high: covariances between which tokens are drawn.
    """
    difference = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    loss, statistics = clipped(ratio(difference), difference, batch, clip_low, clip_high, dual_clip=None)
    drawn = batch["cov_clipped"]
    return torch.where(drawn, 0.0, loss), statistics | {"clip/cov": drawn.to(loss.dtype)}


def select_kl_cov(
    logprobs: Tensor, batch: TensorDict, *, all_sum: AllSum, seed: int, share: float
) -> dict[str, Tensor]:
    """`cov_penalized` (B, T) bool: the trained tokens of largest covariance."""
    keep = batch["loss_mask"]
    covariance = covariances(logprobs, batch, all_sum)
    count = share_of(share, keep, all_sum)
    return {"cov_penalized": largest(covariance, keep, count, draws_of(batch, seed), all_sum)}


@LOSSES.register(
    "kl_cov",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("share", "kappa"),
    prepare=select_kl_cov,
    gradient=Gradient("exact", note="the penalty has no gradient where the old policy is the current one"),
)
def kl_cov(logprobs: Tensor, batch: TensorDict, *, share: Fraction, kappa: NonNegativeFloat) -> Unreduced:
    """-A r, and + kappa |lp - lp_old| for the tokens of largest covariance in the mini-batch. KL-Cov.

    arXiv 2505.22617, section 4.2; the covariance is that of `clip_cov`. There is no clip.

    Statistics: `kl/old` (k3 estimate of the KL divergence of the old from the current policy), `cov/penalized` (1 for
    a token that is).

    Args:
        share: of all trained tokens that are penalized, rounded down, at least one.
        kappa: coefficient of the penalty.
    """
    keep, penalized = batch["loss_mask"], batch["cov_penalized"]
    difference = log_ratio(logprobs, batch["old_logprobs"], keep)  # (B, T)
    loss = -torch.where(keep, batch["advantages"], 0.0) * ratio(difference)
    loss = loss + kappa * torch.where(penalized, difference.abs(), 0.0)
    return loss, {"kl/old": k3(-difference.detach()), "cov/penalized": penalized.to(loss.dtype)}


def select_m2po(
    logprobs: Tensor, batch: TensorDict, *, all_sum: AllSum, tau: float, among: Literal["all", "outward"]
) -> dict[str, Tensor]:
    """`m2_masked` (B, T) bool: the tokens furthest from the rollout policy, as many as the second moment asks for."""
    difference = log_ratio(logprobs, batch["rollout_logprobs"], batch["loss_mask"])
    difference = difference.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)  # (B, T)
    mask = batch["loss_mask"]
    if among == "outward":
        mask = mask & (difference * batch["advantages"] > 0)
    return {"m2_masked": mask & ~up_to_mean(difference.square(), mask, tau, all_sum)}


@LOSSES.register(
    "m2po",
    reads=("old_logprobs", "advantages", "rollout_logprobs"),
    idle_on_policy=("clip_low", "clip_high"),
    prepare=select_m2po,
    gradient=Gradient("exact", note="nothing is masked where the rollout policy is the current one"),
)
def m2po(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    clip_low: ClipBound,
    clip_high: ClipBound,
    tau: NonNegativeFloat,
    among: Literal["all", "outward"],
) -> Unreduced:
    """`ppo_clip`, and 0 for the tokens of largest squared log-ratio to the rollout policy: as few as possible, so
    that its mean over the other tokens of the mini-batch is at most tau. M2PO, arXiv 2510.01161, algorithm 1.

    The paper masks only among the tokens that a step moves further out (A > 0 and r > 1, or A < 0 and r < 1), and
    does not clip: `among: outward` and infinite clips. Tokens of equal log-ratio are masked together. The weights of
    the others do not change (footnote 2).

    Statistics: as `ppo_clip`, and `clip/m2` (1 for a masked token).

    Args:
        clip_low, clip_high: the ratio to the old policy is clipped to [1 - low, 1 + high]; .inf turns it off.
        tau: bound of the mean squared log-ratio.
        among: the tokens that are counted and masked: all, or those that move outward.
    """
    difference = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    loss, statistics = clipped(ratio(difference), difference, batch, clip_low, clip_high, dual_clip=None)
    masked = batch["m2_masked"]
    return torch.where(masked, 0.0, loss), statistics | {"clip/m2": masked.to(loss.dtype)}
