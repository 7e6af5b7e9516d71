"""Statistics of the scores of a group: the rows that answer one prompt. Computed in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 4 * torch.finfo(torch.float32).eps  # scores are float32 sums: closer than this, relatively, they are equal


class GroupStatistics(NamedTuple):
    """What every row knows of its group; each (N,) float64 but `tied`.

    Attributes:
        size: rows in the group.
        mean: mean score.
        std: standard deviation with ddof 1; 0 in a group of one.
        tied: bool, True where all scores of the group are equal up to rounding (so, too, in a group of one).
    """

    size: Tensor
    mean: Tensor
    std: Tensor
    tied: Tensor


def group_statistics(scores: Tensor, group: Tensor) -> GroupStatistics:
    """Statistics of the group of every row.

    Args:
        scores: (N,).
        group: (N,) int64; whole groups, in any order.
    """
    scores = scores.double()
    ids, index = torch.unique(group, return_inverse=True)
    zeros = scores.new_zeros(len(ids))
    size = zeros.index_add(0, index, torch.ones_like(scores))
    mean = zeros.index_add(0, index, scores) / size
    squares = zeros.index_add(0, index, (scores - mean[index]).square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    lowest = zeros.scatter_reduce(0, index, scores, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, scores, "amax", include_self=False)
    tied = highest - lowest <= ROUNDING * torch.maximum(highest.abs(), lowest.abs())
    return GroupStatistics(size[index], mean[index], std[index], tied[index])


def informative_groups(scores: Tensor, group: Tensor) -> Tensor:
    """True for the rows of groups whose scores differ by more than rounding: those that dynamic sampling keeps.

    DAPO, arXiv 2503.14476, section 3.2.

    Args:
        scores: (N,) a raw term. A shaped score would not do: a length penalty breaks every tie.
        group: (N,) int64.

    Returns:
        (N,) bool.
    """
    return ~group_statistics(scores, group).tied
