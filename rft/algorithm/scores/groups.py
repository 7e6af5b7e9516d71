"""Statistics of the scores of a group: the rows that answer one prompt. Computed in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDING = 4 * torch.finfo(torch.float32).eps  # scores are float32 sums: closer than this, relatively, they are equal


class GroupStatistics(NamedTuple):
    """The statistics of the group of every row; each (N,) float64 except `tied`.

    Attributes:
        size: rows in the group.
        mean: mean score.
        std: standard deviation with ddof 1; 0 in a group of one.
        tied: bool, True where all scores of the group are equal up to rounding (so, too, in a group of one).
        centred: score - mean; exactly 0 in a tied group, where a division by the std would amplify rounding errors.
    """

    size: Tensor
    mean: Tensor
    std: Tensor
    tied: Tensor
    centred: Tensor


def dense_numbers(ids: Tensor) -> Tensor:
    """Equal numbers for equal ids, from 0 on in the order of the ids, (N,) int64 below N.

    `torch.unique` gives the same numbers, but the host waits for how many there are.

    Args:
        ids: (N,) int64.
    """
    ordered, order = ids.sort(stable=True)
    new = torch.nn.functional.pad(ordered[1:] != ordered[:-1], (min(1, len(ids)), 0))
    return torch.zeros_like(ids).scatter(0, order, new.cumsum(0))


def group_statistics(scores: Tensor, group: Tensor) -> GroupStatistics:
    """Statistics of the group of every row.

    Args:
        scores: (N,); N may be 0.
        group: (N,) int64; whole groups, in any order.
    """
    scores = scores.double()
    index, zeros = dense_numbers(group), torch.zeros_like(scores)
    size = zeros.index_add(0, index, torch.ones_like(scores))
    mean = zeros.index_add(0, index, scores) / size
    rest = scores - mean[index]
    std = (zeros.index_add(0, index, rest.square()) / (size - 1).clamp(min=1)).sqrt()
    lowest = zeros.scatter_reduce(0, index, scores, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, scores, "amax", include_self=False)
    tied = (highest - lowest <= ROUNDING * torch.maximum(highest.abs(), lowest.abs()))[index]
    return GroupStatistics(size[index], mean[index], std[index], tied, torch.where(tied, 0.0, rest))


def informative_groups(scores: Tensor, group: Tensor) -> Tensor:
    """True for the rows of groups whose scores differ by more than rounding: those that dynamic sampling keeps.

    DAPO, arXiv 2503.14476, section 3.2.

    Args:
        scores: (N,) before any shaping: a length penalty breaks every tie.
        group: (N,) int64.

    Returns:
        (N,) bool.
    """
    return ~group_statistics(scores, group).tied


def best_rows(scores: Tensor, group: Tensor, unit: Tensor) -> Tensor:
    """True for one row of each group, that of the highest score; of several, for that of the lowest `unit`, (N,) bool.

    Args:
        scores: (N,).
        group: (N,) int64; whole groups, in any order.
        unit: (N,) int64, different within a group.
    """
    order = unit.argsort()
    for key in (-scores, group):
        order = order[key[order].argsort(stable=True)]
    ordered = group[order]
    best = torch.ones_like(group, dtype=torch.bool)
    best[order[1:]] = ordered[1:] != ordered[:-1]
    return best


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


def best_over_second(scores: Tensor, group: Tensor) -> Tensor:
    """r(1) - r(2) for the best row of its group and 0 for the others, (N,) float64.

    A group of one, and one whose best rows are several (up to rounding), has 0 everywhere.

    Args:
        scores: (N,).
        group: (N,) int64; whole groups, in any order.
    """
    scores = scores.double()
    index, lowest = dense_numbers(group), torch.full_like(scores, -torch.inf)
    highest = lowest.scatter_reduce(0, index, scores, "amax")[index]
    best = highest - scores <= ROUNDING * highest.abs()
    alone = torch.zeros_like(scores).index_add(0, index, best.double())[index] == 1
    second = lowest.scatter_reduce(0, index, torch.where(best, -torch.inf, scores), "amax")[index]
    return torch.where(best & alone & second.isfinite(), scores - second, 0.0)
