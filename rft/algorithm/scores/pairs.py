"""Pairs: a better and a worse answer to one prompt, two rows with the same `unit`."""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.scores.groups import best_rows, dense_numbers, informative_groups


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
