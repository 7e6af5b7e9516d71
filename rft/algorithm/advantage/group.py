"""Advantages against the other answers to the same prompt: one number a row, on every trained token of it.

A row without a trained token gets no advantage, yet its score counts in the statistics of its group.
"""

import functools
import logging
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.groups import GroupStatistics, group_statistics
from rft.algorithm.registries import ADVANTAGES, AllSum
from rft.algorithm.whiten import moments

log = logging.getLogger(__name__)
EPSILON = 1e-6


@ADVANTAGES.register("group_norm", group_baseline=True)
def group_norm(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, scale: Literal["group", "batch", "none"]
) -> dict[str, Tensor]:
    """(R - mean_g) / (std + 1e-6). GRPO, arXiv 2402.03300, section 4.1.

    The standard deviation has ddof 1. A group of one and a group of equal scores (up to rounding) get exactly 0.

    Args:
        scale: whose standard deviation divides: that of the group (GRPO); that of all scores of the step over all
            ranks (arXiv 2508.08221); none (Dr.GRPO).
    """
    group = group_statistics(scores, batch["group"])
    advantage = _centred(scores, group)
    if scale == "group":
        advantage = advantage / (group.std + EPSILON)
    elif scale == "batch":
        _, variance = moments(scores, torch.ones_like(scores, dtype=torch.bool), all_sum)
        advantage = advantage / (variance.sqrt() + EPSILON)
    return _spread(advantage, scores, batch)


@ADVANTAGES.register("dr_grpo", group_baseline=True)
def dr_grpo(scores: Tensor, rewards: Tensor, batch: TensorDict) -> dict[str, Tensor]:
    """R - mean_g. Dr.GRPO, arXiv 2503.20783, section 3.2; its other half is the constant of the aggregation."""
    return _spread(_centred(scores, group_statistics(scores, batch["group"])), scores, batch)


@ADVANTAGES.register("rloo", group_baseline=True)
def rloo(scores: Tensor, rewards: Tensor, batch: TensorDict) -> dict[str, Tensor]:
    """R - mean score of the other rows of the group. RLOO, arXiv 2402.14740, section 3.

    That is n / (n - 1) * (R - mean_g). A group of one has no others: 0, and a warning once.
    """
    group = group_statistics(scores, batch["group"])
    if (group.size == 1).any():
        _warn_of_single_rows()
    return _spread(_centred(scores, group) * group.size / (group.size - 1).clamp(min=1), scores, batch)


def _centred(scores: Tensor, group: GroupStatistics) -> Tensor:
    """R - mean_g, (B,) float64; exactly 0 in a tied group, where rounding would leave a rest that a std blows up."""
    return torch.where(group.tied, 0.0, scores.double() - group.mean)


def _spread(advantage: Tensor, scores: Tensor, batch: TensorDict) -> dict[str, Tensor]:
    """A row's advantage (B,) on each of its trained tokens."""
    return {"advantages": torch.where(batch["keep"], advantage.to(scores.dtype)[:, None], 0.0)}  # (B, T)


@functools.cache
def _warn_of_single_rows() -> None:
    log.warning("rloo: a group of one row has no other rows to compare with; its advantage is 0")
