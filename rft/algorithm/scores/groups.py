"""Rows that answer one prompt: the statistics of their scores, in float64, their pairs, and which of them train.

A pair is a better and a worse answer, two rows with the same `unit`.

A selection says which rows of a step train, and how often: by their scores, before any shaping. It is a function
f(batch, *, [all_rows,] [seed,] options) -> (counts, columns). `counts`, (B,) int64, is how often each row trains; None:
every row once. `columns` are what it writes, (B,) each. `all_rows` collects an object from every rank, so that a choice
over all ranks needs no process group.

Facts of a selection: `masks`, rows with a count of 0 leave the loss mask, before anything is counted (the others train
once); otherwise rows are repeated after the advantages are known. `writes`, its columns. `groups`, it compares the rows
of a group. `pairs`, what it leaves are units of two rows. `resamples`, it draws by |score|.
"""

from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import SELECTIONS, AllRows
from rft.batch.counter_rng import token_draws
from rft.ranges import NonNegativeFloat

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


def both(values: Tensor, batch: TensorDict) -> tuple[Tensor, Tensor, Tensor]:
    """The values of both rows of the pair of every row.

    Args:
        values: a number a row, (B,).
        batch: with `unit`, `chosen` and `loss_mask`; pairs are whole, in any order.

    Returns:
        The value of the chosen row (B,), that of the rejected one (B,), and (B,) bool, True where both have a trained
        token; the values are 0 elsewhere.
    """
    trained = batch["loss_mask"].any(1)
    sides = torch.stack([trained & batch["chosen"], trained & ~batch["chosen"]])  # (2, B)
    index = dense_numbers(batch["unit"])
    zeros = values.new_zeros(2, len(index))
    whole = (zeros.index_add(1, index, sides.to(values.dtype)) == 1).all(0)
    sums = zeros.index_add(1, index, torch.where(sides, values, 0.0)) * whole
    chosen, rejected = sums[:, index]
    return chosen, rejected, whole[index]


def best_and_worst(scores: Tensor, group: Tensor, unit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Makes a pair of the best and the worst row of each group whose scores differ.

    Args:
        scores: (N,).
        group: (N,) int64; whole groups, in any order.
        unit: (N,) int64, different for every row.

    Returns:
        (N,) bool, True for the best row of a group; (N,) int64 units, the best row's for the worst one, too; and (N,)
        bool, True for the rows of pairs.
    """
    best, worst = best_rows(scores, group, unit), best_rows(-scores, group, unit)
    index, of_best = dense_numbers(group), torch.zeros_like(unit)
    of_best[index[best]] = unit[best]
    return best, torch.where(worst, of_best[index], unit), (best | worst) & informative_groups(scores, group)


Selected = tuple[Tensor | None, dict[str, Tensor]]


@SELECTIONS.register("all")
def every_row(batch: TensorDict) -> Selected:
    """Every row trains once."""
    return None, {}


@SELECTIONS.register("best", masks=True, groups=True)
def best(batch: TensorDict) -> Selected:
    """The best row of each group trains; of equal ones the first (RAFT, 2304.06767)."""
    return best_rows(batch["scores"], batch["group"], batch["unit"]).long(), {}


@SELECTIONS.register("best_and_worst", masks=True, groups=True, pairs=True, writes=("chosen",))
def best_and_worst_pair(batch: TensorDict) -> Selected:
    """The best and the worst row of each group train as a pair, where their scores differ."""
    chosen, unit, picked = best_and_worst(batch["scores"], batch["group"], batch["unit"])
    return picked.long(), {"chosen": chosen, "unit": unit}


@SELECTIONS.register("resample", resamples=True)
def resample(batch: TensorDict, *, all_rows: AllRows, seed: int, power: NonNegativeFloat) -> Selected:
    """As many rows as there are on all ranks, drawn with replacement with weight |score|^power (PF-PPO, 2409.06957).

    Args:
        batch: with `unit` and `scores`, (B,).
        power: 0 draws rows alike, 1 in proportion to the score.
    """
    local_rows = list(zip(batch["unit"].tolist(), batch["scores"].tolist(), strict=True))
    rows = sorted(row for rank_rows in all_rows(local_rows) for row in rank_rows)
    scores = torch.tensor([score for _, score in rows])
    counts = dict(zip(rows, resample_counts(scores, power, seed).tolist(), strict=True))
    return torch.tensor([counts[row] for row in local_rows], dtype=torch.int64), {}


def resample_counts(scores: Tensor, power: float, seed: int) -> Tensor:
    """How often each row is drawn when as many rows are drawn as there are, with weight |score|^power. (N,) int64

    Where every score is 0, every row stays once.

    Args:
        scores: (N,) of all ranks, in an order that does not depend on the ranks.
        power: 0 draws rows alike, 1 in proportion to the score.
        seed: of this step.
    """
    weights = scores.double().abs() ** power  # (N,)
    if not scores.any():
        return torch.ones(len(scores), dtype=torch.int64)
    draws = token_draws(seed, torch.arange(len(scores)), torch.zeros(1, dtype=torch.int64))[:, 0]  # (N,)
    sums = weights.cumsum(0)
    # rounding may put a draw on the total itself, past the last row of positive weight
    places = torch.searchsorted(sums, (draws * sums[-1]).clamp(max=float(sums[-1]) * (1 - 2.0**-52)), right=True)
    return places.bincount(minlength=len(scores))
