"""Advantages against the other answers to the same prompt, with other baselines and scales than those of GRPO."""

import functools
import logging
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import ADVANTAGES, AllSum, Gradient
from rft.algorithm.advantage.group import EPSILON, spread
from rft.algorithm.scores.groups import dense_numbers, group_statistics
from rft.algorithm.statistics import whitened
from rft.ranges import Range

log = logging.getLogger(__name__)


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


def _per_informative(share: Tensor, tied: Tensor, all_sum: AllSum) -> Tensor:
    """The sum of all shares (N,) over that of the rows of groups that are not tied, over all ranks."""
    everything, informative = all_sum(torch.stack([share, share * ~tied]).sum(dim=1)).unbind()
    return everything / informative.clamp(min=1)


def weighted_centred(scores: Tensor, weights: Tensor, group: Tensor) -> Tensor:
    """Score - weighted mean of the group, (N,) float64; exactly 0 in a tied group and in one without weight.

    Args:
        scores: (N,).
        weights: (N,) not negative.
        group: (N,) int64; whole groups, in any order.
    """
    index = dense_numbers(group)
    totals = torch.stack([weights.double(), weights.double() * scores])  # (2, N)
    weight, weighted = torch.zeros_like(totals).index_add(1, index, totals)[:, index]  # (N,) each
    nothing = group_statistics(scores, group).tied | (weight == 0)
    return torch.where(nothing, 0.0, scores.double() - weighted / weight)
