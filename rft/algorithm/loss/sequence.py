"""Policy losses that weigh the tokens of a row by one ratio, that of the whole row.

They are meant for advantages that are equal on all tokens of a row. Where those differ, each docstring says what the
loss does with them.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import LOSSES, Gradient, Unreduced
from rft.algorithm.divergence import LARGEST_LOG_RATIO, k3, log_ratio, ratio
from rft.algorithm.loss.clip import clip_statistics, clipped
from rft.algorithm.loss.soft import reinforced
from rft.algorithm.scores.groups import dense_numbers
from rft.algorithm.token_weights.aggregation import row_mean
from rft.ranges import ClipBound, Fraction, NonNegativeFloat, PositiveFloat


@LOSSES.register(
    "gspo",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("clip_low", "clip_high"),
    gradient=Gradient("exact", note="for advantages that are equal within a row; otherwise a row takes their mean"),
)
def gspo(logprobs: Tensor, batch: TensorDict, *, clip_low: Fraction, clip_high: ClipBound) -> Unreduced:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) per token, s = exp(mean over the row's tokens of the log-ratio).

    GSPO, arXiv 2507.18071, equation 5 with `seq_mean_token_mean`: every token of a row carries the same s, and the
    gradient of s reaches all of them. `gspo_token` has the same value and, where the advantages of a row are equal, the
    same gradient. Statistics as `ppo_clip`.

    Args:
        clip_low, clip_high: s is clipped to [1 - low, 1 + high].
    """
    difference = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    s = ratio(row_mean(difference, batch["loss_mask"]))[:, None]  # (B, 1)
    return clipped(s.expand_as(difference), difference, batch, clip_low, clip_high, dual_clip=None)


@LOSSES.register(
    "gspo_token",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("clip_low", "clip_high"),
    gradient=Gradient("exact"),
)
def gspo_token(logprobs: Tensor, batch: TensorDict, *, clip_low: Fraction, clip_high: ClipBound) -> Unreduced:
    """gspo with s_t = sg(s) * exp(lp - sg(lp)): the value is that of the row, the gradient that of the token.

    GSPO-token, arXiv 2507.18071, section 4.3: for advantages that differ within a row. Statistics as `ppo_clip`.

    Args:
        clip_low, clip_high: s_t is clipped to [1 - low, 1 + high].
    """
    difference = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    s = ratio(row_mean(difference.detach(), batch["loss_mask"]))[:, None]  # (B, 1)
    token_ratio = (difference - difference.detach()).exp()  # (B, T), all ones
    return clipped(s * token_ratio, difference, batch, clip_low, clip_high, dual_clip=None)


@LOSSES.register(
    "luspo",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("clip_low", "clip_high"),
    gradient=Gradient("exact", target="reward, times tokens", note="seq_mean_token_mean divides by them again"),
)
def luspo(logprobs: Tensor, batch: TensorDict, *, clip_low: Fraction, clip_high: ClipBound) -> Unreduced:
    """gspo times the number of trained tokens of the row: takes the length bias out of `seq_mean_token_mean`.

    LUSPO, arXiv 2602.05261. Statistics as `ppo_clip`.

    Args:
        clip_low, clip_high: s is clipped to [1 - low, 1 + high].
    """
    loss, statistics = gspo(logprobs, batch, clip_low=clip_low, clip_high=clip_high)
    return loss * batch["loss_mask"].sum(dim=1, keepdim=True), statistics


@LOSSES.register(
    "gmpo",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("clip_low", "clip_high"),
    unit="sequence",
    geometric_mean=True,
    gradient=Gradient("exact", target="reward, mean over tokens", note="as other losses with seq_mean_token_mean"),
)
def gmpo(logprobs: Tensor, batch: TensorDict, *, clip_low: NonNegativeFloat, clip_high: NonNegativeFloat) -> Unreduced:
    """-A exp(mean over the row's tokens of u) per row, u the log-ratio l clipped on the side that A pushes it to.

    u = sgn(A) min(sgn(A) l, sgn(A) clip(l, -low, high)): the geometric mean of clipped ratios. GMPO, arXiv 2507.20673.
    A is the mean of the row's advantages, its sign that of every token.

    Statistics, (B,), means over the tokens of the row: `clip/low`, `clip/high` (tokens that the clip takes the gradient
    of), `kl/old`.

    Args:
        clip_low, clip_high: the log-ratio (not the ratio) is clipped to [-low, high].
    """
    keep = batch["loss_mask"]
    advantages = torch.where(keep, batch["advantages"], 0.0)
    better, worse = advantages > 0, advantages < 0
    difference = log_ratio(logprobs, batch["old_logprobs"], keep)  # (B, T)
    u = torch.where(better, difference.clamp(max=clip_high), difference.clamp(min=-clip_low))
    loss = -row_mean(advantages, keep) * ratio(row_mean(torch.where(better | worse, u, 0.0), keep))  # (B,)
    statistics = clip_statistics(worse & (difference < -clip_low), better & (difference > clip_high), difference)
    return loss, {name: row_mean(number, keep) for name, number in statistics.items()}


@LOSSES.register("topr", reads=("rollout_logprobs", "advantages"), gradient=Gradient("exact"))
def topr(logprobs: Tensor, batch: TensorDict) -> Unreduced:
    """-A lp where A >= 0, -A sg(min(W, 1)) lp where A < 0, W the ratio of the whole row to the rollout policy.

    TOPR, arXiv 2503.14286, with the truncation [0, 1] for negative and none for positive rows: rows of
    negative advantage that have become unlikely are not lowered further. Pairs with `seq_mean_token_sum`.

    Statistics: `clip/high` (1 where A < 0 and W > 1), `kl/rollout` (k3 estimate of the KL divergence of the rollout
    from the current policy).
    """
    difference = log_ratio(logprobs.detach(), batch["rollout_logprobs"], batch["loss_mask"])  # (B, T)
    worse = batch["loss_mask"] & (batch["advantages"] < 0)
    row = ratio(difference.sum(dim=1, keepdim=True))  # (B, 1)
    weight = torch.where(worse, row.clamp(max=1), 1.0)
    high = (worse & (row > 1)).to(difference.dtype)
    return reinforced(logprobs, batch, weight), {"clip/high": high, "kl/rollout": k3(-difference)}


@LOSSES.register(
    "vespo",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("k_positive", "lambda_positive", "k_negative", "lambda_negative"),
    gradient=Gradient("exact"),
)
def vespo(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    k_positive: NonNegativeFloat,
    lambda_positive: NonNegativeFloat,
    k_negative: NonNegativeFloat,
    lambda_negative: NonNegativeFloat,
) -> Unreduced:
    """-A sg(phi(W)) lp per token, phi(W) = W^k exp(lambda (1 - W)), W the ratio of the whole row to the old policy.

    VESPO, arXiv 2602.10693: a soft bound on the weight of a row, with no division by its length; phi(1) = 1.

    Statistics: `kl/old`, as `ppo_clip`.

    Args:
        k_positive, lambda_positive: where A > 0; phi is largest at W = k / lambda, and above that falls to 0.
        k_negative, lambda_negative: where A < 0.
    """
    difference = log_ratio(logprobs.detach(), batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    row = difference.sum(dim=1, keepdim=True).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)  # (B, 1), ln W
    positive, negative = (
        (k * row + rate * (1 - row.exp())).exp()
        for k, rate in ((k_positive, lambda_positive), (k_negative, lambda_negative))
    )
    weight = torch.where(batch["advantages"] > 0, positive, negative)
    return reinforced(logprobs, batch, weight), {"kl/old": k3(-difference)}


@LOSSES.register(
    "gvpo",
    reads=("old_logprobs", "advantages"),
    unit="group",
    gradient=Gradient("scaled", note="by beta, for advantages whose sum over a group is 0"),
)
def gvpo(logprobs: Tensor, batch: TensorDict, *, beta: PositiveFloat) -> Unreduced:
    """((beta S - R) - its mean over the group)^2 / 2 per row, S the row's sum of log-ratios.

    GVPO, arXiv 2504.19599: the implicit reward of the policy, beta S, is fitted to the scores; the centring
    cancels the constant that is undetermined in both. R is the mean of the row's advantages; any estimator that shifts
    the scores of a group by one number gives the same loss, `dr_grpo` among them. Rows without a trained token are in
    no mean.

    Statistics: `kl/old`, the mean over the row's tokens, (B,).

    Args:
        beta: the strength of the pull to the old policy, in scores per nat.
    """
    keep = batch["loss_mask"]
    difference = log_ratio(logprobs, batch["old_logprobs"], keep)  # (B, T)
    trained = keep.any(dim=1)  # (B,)
    gap = beta * difference.sum(dim=1) - row_mean(torch.where(keep, batch["advantages"], 0.0), keep)  # (B,)
    index = dense_numbers(batch["group"])
    total, rows = (
        gap.new_zeros(len(index)).index_add(0, index, part) for part in (gap, trained.to(gap.dtype))
    )  # a row without a trained token adds 0 to both
    centred = gap - (total / rows.clamp(min=1))[index]
    return torch.where(trained, 0.5 * centred.square(), 0.0), {"kl/old": row_mean(k3(-difference.detach()), keep)}
