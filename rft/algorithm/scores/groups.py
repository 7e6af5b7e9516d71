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

from rft.algorithm import SELECTIONS

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


Selected = tuple[Tensor | None, dict[str, Tensor]]


@SELECTIONS.register("all")
def every_row(batch: TensorDict) -> Selected:
    """Every row trains once."""
    return None, {}


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
