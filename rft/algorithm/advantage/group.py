"""Advantages against the other answers to the same prompt: one number a row, on every trained token of it.

A row without a trained token gets no advantage, yet its score counts in the statistics of its group.
"""

import functools
import logging
from collections.abc import Mapping
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.advantage.whiten import moments, whitened
from rft.algorithm.gradient import Gradient
from rft.algorithm.registries import ADVANTAGES, AllSum
from rft.algorithm.scores.groups import group_statistics, weighted_centred

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
        _, variance = moments(scores, torch.ones_like(scores, dtype=torch.bool), all_sum)
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
    advantage = _left_out(scores, batch).double()
    return {
        "advantages": spread(whitened(advantage, torch.ones_like(advantage, dtype=torch.bool), all_sum), scores, batch)
    }


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
    return {"advantages": spread(whitened(total, torch.ones_like(total, dtype=torch.bool), all_sum), scores, batch)}


def spread(advantage: Tensor, scores: Tensor, batch: TensorDict) -> Tensor:
    """A row's advantage (B,) on each of its trained tokens, (B, T), in the dtype of the scores."""
    return torch.where(batch["loss_mask"], advantage.to(scores.dtype)[:, None], 0.0)


@functools.cache
def _warn_of_single_rows() -> None:
    log.warning("rloo: a group of one row has no other rows to compare with; its advantage is 0")
