"""Which rows train by their scores: the best, pairs of the best and the worst, or rows drawn by weight."""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import SELECTIONS, AllRows
from rft.algorithm.scores.groups import Selected, dense_numbers, informative_groups
from rft.batch.counter_rng import token_draws
from rft.ranges import NonNegativeFloat


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
