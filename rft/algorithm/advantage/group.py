"""Advantages against the other answers to the same prompt: one number a row, on every trained token of it.

A row without a trained token gets no advantage, yet its score counts in the statistics of its group.
"""

from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import ADVANTAGES, AllSum, Gradient
from rft.algorithm.scores.groups import group_statistics
from rft.algorithm.statistics import moments

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


def spread(advantage: Tensor, scores: Tensor, batch: TensorDict) -> Tensor:
    """A row's advantage (B,) on each of its trained tokens, (B, T), in the dtype of the scores."""
    return torch.where(batch["loss_mask"], advantage.to(scores.dtype)[:, None], 0.0)
