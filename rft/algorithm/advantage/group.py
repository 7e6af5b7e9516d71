"""Advantages against the other answers to the same prompt: one number a row, on every trained token of it.

A row without a trained token gets no advantage, yet its score counts in the statistics of its group.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import ADVANTAGES, AllSum, Gradient
from rft.algorithm.scores.groups import ROUNDING, best_over_second, group_statistics, weighted_centred
from rft.algorithm.statistics import moments, whitened
from rft.ranges import PositiveFloat, Range

log = logging.getLogger(__name__)
EPSILON = 1e-6
OWN_SCORE = Gradient("scaled", factor=lambda n: (n - 1) / n, note="a row's own score is in its baseline")


def _gradient_of_group_norm(scale: str) -> Gradient:
    if scale == "none":
        return OWN_SCORE
    cosine = 0.982 if scale == "group" else 0.991
    return Gradient(
        "near", cosine=cosine, note="rescaled for binary scores of one prompt; graded scores change its direction"
    )


@ADVANTAGES.register("group_norm", group_baseline=True, gradient=_gradient_of_group_norm)
def group_norm(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, scale: Literal["group", "batch", "none"]
) -> dict[str, Tensor]:
    """(R - mean_g) / (std + 1e-6). GRPO, arXiv 2402.03300, section 4.1.

    The standard deviation has ddof 1. A group of one and a group of equal scores (up to rounding) get exactly 0.

    Args:
        scale: which standard deviation divides: that of the group (GRPO); that of all scores of the step over all
            ranks (arXiv 2508.08221); none (Dr.GRPO).
    """
    group = group_statistics(scores, batch["group"])
    advantage = group.centred
    if scale == "group":
        advantage = advantage / (group.std + EPSILON)
    elif scale == "batch":
        _, variance = moments(scores, None, all_sum)
        advantage = advantage / (variance.sqrt() + EPSILON)
    return {"advantages": spread(advantage, scores, batch)}


@ADVANTAGES.register("dr_grpo", group_baseline=True, gradient=OWN_SCORE)
def dr_grpo(scores: Tensor, rewards: Tensor, batch: TensorDict) -> dict[str, Tensor]:
    """R - mean_g. Dr.GRPO, arXiv 2503.20783, section 3.2; its other half is the constant of the aggregation."""
    return {"advantages": spread(group_statistics(scores, batch["group"]).centred, scores, batch)}


@ADVANTAGES.register("rloo", group_baseline=True, gradient=Gradient("exact"))
def rloo(scores: Tensor, rewards: Tensor, batch: TensorDict) -> dict[str, Tensor]:
    """R - mean score of the other rows of the group. RLOO, arXiv 2402.14740, section 3.

    That is n / (n - 1) * (R - mean_g). A group of one has no others: 0, and a warning once.
    """
    return {"advantages": spread(_left_out(scores, batch), scores, batch)}


@ADVANTAGES.register(
    "rloo_whitened", group_baseline=True, gradient=Gradient("near", cosine=0.998, note="its scale is random")
)
def rloo_whitened(scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum) -> dict[str, Tensor]:
    """`rloo`, whitened over the rows of all ranks, whatever their lengths."""
    advantage = whitened(_left_out(scores, batch).double(), None, all_sum)
    return {"advantages": spread(advantage, scores, batch)}


def _left_out(scores: Tensor, batch: TensorDict) -> Tensor:
    group = group_statistics(scores, batch["group"])
    if (group.size == 1).any():
        _warn_of_single_rows()
    return group.centred * group.size / (group.size - 1).clamp(min=1)


@ADVANTAGES.register(
    "reinforce_pp_baseline", group_baseline=True, gradient=Gradient("near", cosine=0.994, note="its scale is random")
)
def reinforce_pp_baseline(scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum) -> dict[str, Tensor]:
    """R - mean_g, whitened over the trained tokens of all ranks. REINFORCE++ with baseline, arXiv 2501.03262."""
    centred = spread(group_statistics(scores, batch["group"]).centred, scores, batch)
    return {"advantages": whitened(centred, batch["loss_mask"], all_sum)}


@ADVANTAGES.register(
    "opo", group_baseline=True, gradient=Gradient("near", cosine=0.998, note="a row's own score is in its baseline")
)
def opo(scores: Tensor, rewards: Tensor, batch: TensorDict) -> dict[str, Tensor]:
    """R - sum_g L R / sum_g L, L the trained tokens of a row. OPO, arXiv 2505.23585, section 3.

    With rows of one length it is `dr_grpo`. A row without a trained token weighs nothing in the baseline.
    """
    return {
        "advantages": spread(weighted_centred(scores, batch["loss_mask"].sum(dim=1), batch["group"]), scores, batch)
    }


@ADVANTAGES.register(
    "gdpo",
    reads=("terms",),
    raw=True,
    group_baseline=True,
    gradient=Gradient("near", cosine=0.977, note="its scales are random"),
)
def gdpo(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, term_weights: Mapping[str, float]
) -> dict[str, Tensor]:
    """sum over reward terms k of w_k (R^k - mean_g) / (std_g + 1e-6), whitened. GDPO, arXiv 2601.05242, section 3.

    Every term is normalised by itself, so that a term with a large spread does not dominate the others; a group whose
    rows tie in a term gets 0 for that term. The whitening is over the rows of all ranks, whatever their lengths. The
    raw terms are read: shaping and a KL in the reward do not change them.
    """
    total = torch.zeros_like(scores, dtype=torch.float64)
    for term, weight in term_weights.items():
        group = group_statistics(batch["terms", term], batch["group"])
        total += weight * group.centred / (group.std + EPSILON)
    return {"advantages": spread(whitened(total, None, all_sum), scores, batch)}


def spread(advantage: Tensor, scores: Tensor, batch: TensorDict) -> Tensor:
    """A row's advantage (B,) on each of its trained tokens, (B, T), in the dtype of the scores."""
    return torch.where(batch["loss_mask"], advantage.to(scores.dtype)[:, None], 0.0)


@functools.cache
def _warn_of_single_rows() -> None:
    log.warning("rloo: a group of one row has no other rows to compare with; its advantage is 0")


REWEIGHED = Gradient(
    "near", cosine=0.991, note="rescaled for one prompt; with several, its weight depends on the others"
)


def _gradient_of_gpg(scale: str) -> Gradient:
    if scale == "none":
        return REWEIGHED
    return Gradient("near", cosine=0.997, note="rescaled for one prompt; graded scores change its direction")


@ADVANTAGES.register("gpg", group_baseline=True, gradient=_gradient_of_gpg)
def gpg(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, scale: Literal["group", "none"]
) -> dict[str, Tensor]:
    """alpha (R - mean_g), alpha = rows / rows in groups with unequal scores. GPG, arXiv 2504.02546, section 2.

    Both counts are over all ranks: the step is as large as if every group had a signal.

    Args:
        scale: F_norm of the paper. none: 1; group: divides by the standard deviation of the group (ddof 1) + 1e-6.
    """
    group = group_statistics(scores, batch["group"])
    advantage = _per_informative(torch.ones_like(group.size), group.tied, all_sum) * group.centred
    if scale == "group":
        advantage = advantage / (group.std + EPSILON)
    return {"advantages": spread(advantage, scores, batch)}


@ADVANTAGES.register("cpgd", group_baseline=True, gradient=REWEIGHED)
def cpgd(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, max_weight: Annotated[float, Range(low=1)]
) -> dict[str, Tensor]:
    """(R - mean_g) * min(groups / groups with unequal scores, max_weight). CPGD, arXiv 2505.12504, section 4.

    Args:
        max_weight: bound of the weight, for steps in which few groups have a signal.
    """
    group = group_statistics(scores, batch["group"])
    weight = _per_informative(1 / group.size, group.tied, all_sum).clamp(max=max_weight)
    return {"advantages": spread(weight * group.centred, scores, batch)}


def _gradient_of_pass_at_k(scale: bool) -> Gradient:
    if scale:
        return Gradient("near", target="max reward", cosine=0.968, note="the std of the group changes its direction")
    return Gradient(
        "scaled", target="max reward", factor=lambda n: 1 / n, note="only one row of a group has an advantage"
    )


@ADVANTAGES.register("pass_at_k", group_baseline=True, gradient=_gradient_of_pass_at_k)
def pass_at_k(scores: Tensor, rewards: Tensor, batch: TensorDict, *, scale: bool) -> dict[str, Tensor]:
    """r(1) - r(2) for the best row of a group, 0 for the others. arXiv 2503.19595, section 3.

    Its gradient is that of the expected best score of a group: pass@k for binary scores, with k the size of the group.
    A group of one, and one with several best rows, gets 0.

    Args:
        scale: divides by the standard deviation of the group (ddof 1) + 1e-6.
    """
    advantage = best_over_second(scores, batch["group"])
    if scale:
        advantage = advantage / (group_statistics(scores, batch["group"]).std + EPSILON)
    return {"advantages": spread(advantage, scores, batch)}


def _gradient_of_maxrl(order: str) -> Gradient:
    return Gradient("exact", target=f"log likelihood to order {order}", note="of binary scores")


@ADVANTAGES.register("maxrl", raw=True, group_baseline=True, gradient=_gradient_of_maxrl)
def maxrl(scores: Tensor, rewards: Tensor, batch: TensorDict, *, order: Literal["n-1", "n"]) -> dict[str, Tensor]:
    """(R - mean_g) / mean_g. MaxRL, arXiv 2602.02710, section 4.

    For scores of 0 and 1 and a rate of success p, the expected gradient is sum_{k <= order} (1 - p)^(k - 1) grad p: the
    log of p, expanded to that order. A group whose mean is not above 0 counts as failed, so scores must not be below 0.

    Args:
        order: what a failed group gets. n-1: 0; n: -1 on every row, which makes one order more.
    """
    group = group_statistics(scores, batch["group"])
    failed = 0.0 if order == "n-1" else -1.0
    return {"advantages": spread(torch.where(group.mean > 0, group.centred / group.mean, failed), scores, batch)}


def _per_informative(share: Tensor, tied: Tensor, all_sum: AllSum) -> Tensor:
    """The sum of all shares (N,) over that of the rows of groups that are not tied, over all ranks."""
    everything, informative = all_sum(torch.stack([share, share * ~tied]).sum(dim=1)).unbind()
    return everything / informative.clamp(min=1)


def wins(scores: Tensor, others: Tensor, softness: float | None) -> Tensor:
    """The chance that an answer is preferred to another one, by their scores, which are broadcast; float64.

    Args:
        softness: sigmoid of the difference by this; null: the higher score wins, and equal ones (up to rounding) have
            one half each.
    """
    scores, others = torch.broadcast_tensors(scores.double(), others.double())
    if softness is not None:
        return torch.sigmoid((scores - others) / softness)
    tied = (scores - others).abs() <= ROUNDING * torch.maximum(scores.abs(), others.abs())
    return torch.where(tied, 0.5, (scores > others).double())


@ADVANTAGES.register(
    "win_rate",
    group_baseline=True,
    gradient=Gradient("scaled", "win rate", lambda n: (n - 1) / n, note="a row is compared with itself, too"),
)
def win_rate(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, softness: PositiveFloat | None
) -> dict[str, Tensor]:
    """P - 1/2, P the mean probability to be preferred to a row, over all n of the group. SPPO, arXiv 2405.00675.

    The paper's estimate of P(y > policy) by the answers that were sampled, the row itself among them.

    Args:
        softness: null: the higher score is preferred. A number: preferred with the chance sigmoid(difference / it),
            which for the scores of a reward model of the Bradley-Terry kind is 1.
    """
    _, index, sizes = torch.unique(batch["group"], return_inverse=True, return_counts=True)
    rates = torch.empty(len(scores), dtype=torch.float64, device=scores.device)
    for rows in index.argsort(stable=True).split(sizes.tolist()):
        rates[rows] = wins(scores[rows, None], scores[rows], softness).mean(1)
    return {"advantages": spread(rates - 0.5, scores, batch)}
