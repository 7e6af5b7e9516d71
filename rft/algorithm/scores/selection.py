"""Which rows of a step train, and how often: by their scores, before any shaping.

A selection is a function f(batch, *, [all_rows,] [seed,] options) -> (counts, columns). `counts`, (B,) int64, is how
often each row trains; None: every row once. `columns` are what it writes, (B,) each. `all_rows` collects an object from
every rank, so that a choice over all ranks needs no process group.

Facts of a selection: `masks`, rows with a count of 0 leave the loss mask, before anything is counted (the others train
once); otherwise rows are repeated after the advantages are known. `writes`, its columns. `groups`, it compares the rows
of a group. `pairs`, what it leaves are units of two rows. `resamples`, it draws by |score|.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.registries import SELECTIONS, AllRows
from rft.algorithm.scores.groups import best_rows
from rft.algorithm.scores.pairs import best_and_worst
from rft.batch.counter_rng import token_draws
from rft.ranges import NonNegativeFloat

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
