"""Redrawing the rows of a step with replacement."""

import torch
from torch import Tensor

from rft.batch.counter_rng import token_draws


def resample_counts(scores: Tensor, power: float, seed: int) -> Tensor:
    """How often each row is drawn when as many rows are drawn as there are, with weight |score|^power. (N,) int64

    PF-PPO, arXiv 2409.06957: after the advantages are known, so rows whose score says little train less often. Where
    every score is 0, every row stays once.

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
