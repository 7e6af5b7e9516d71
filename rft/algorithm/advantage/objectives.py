"""Advantages whose gradient is that of another objective of a group than the mean score: the best one, a likelihood, a
win rate.
"""

from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import ADVANTAGES, Gradient
from rft.algorithm.advantage.group import EPSILON, spread
from rft.algorithm.scores.groups import ROUNDING, dense_numbers, group_statistics, wins
from rft.ranges import PositiveFloat


def _gradient_of_pass_at_k(scale: bool) -> Gradient:
    if scale:
        return Gradient("near", target="max reward", cosine=0.968, note="the std of the group changes its direction")
    return Gradient(
        "scaled", target="max reward", factor=lambda n: 1 / n, note="only one row of a group has an advantage"
    )


@ADVANTAGES.register("pass_at_k", group_baseline=True, gradient=_gradient_of_pass_at_k)
def pass_at_k(scores: Tensor, rewards: Tensor, batch: TensorDict, *, scale: bool) -> dict[str, Tensor]:
    """r(1) - r(2) for the best row of a group, 0 for the others. arXiv 2503.19595, section 3.

    Its gradient is that of the expected best score of a group: pass@k for binary scores, with k the size of the group.
    A group of one, and one with several best rows, gets 0.

    Args:
        scale: divides by the standard deviation of the group (ddof 1) + 1e-6.
    """
    advantage = best_over_second(scores, batch["group"])
    if scale:
        advantage = advantage / (group_statistics(scores, batch["group"]).std + EPSILON)
    return {"advantages": spread(advantage, scores, batch)}


def _gradient_of_maxrl(order: str) -> Gradient:
    return Gradient("exact", target=f"log likelihood to order {order}", note="of binary scores")


@ADVANTAGES.register("maxrl", raw=True, group_baseline=True, gradient=_gradient_of_maxrl)
def maxrl(scores: Tensor, rewards: Tensor, batch: TensorDict, *, order: Literal["n-1", "n"]) -> dict[str, Tensor]:
    """(R - mean_g) / mean_g. MaxRL, arXiv 2602.02710, section 4.

    For scores of 0 and 1 and a rate of success p, the expected gradient is sum_{k <= order} (1 - p)^(k - 1) grad p: the
    log of p, expanded to that order. A group whose mean is not above 0 counts as failed, so scores must not be below 0.

    Args:
        order: what a failed group gets. n-1: 0; n: -1 on every row, which makes one order more.
    """
    group = group_statistics(scores, batch["group"])
    failed = 0.0 if order == "n-1" else -1.0
    return {"advantages": spread(torch.where(group.mean > 0, group.centred / group.mean, failed), scores, batch)}


@ADVANTAGES.register(
    "win_rate",
    group_baseline=True,
    gradient=Gradient("scaled", "win rate", lambda n: (n - 1) / n, note="a row is compared with itself, too"),
)
def win_rate(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, softness: PositiveFloat | None
) -> dict[str, Tensor]:
    """P - 1/2, P the mean probability to be preferred to a row, over all n of the group. SPPO, arXiv 2405.00675.

    The paper's estimate of P(y > policy) by the answers that were sampled, the row itself among them.

    Args:
        softness: null: the higher score is preferred. A number: preferred with the chance sigmoid(difference / it),
            which for the scores of a reward model of the Bradley-Terry kind is 1.
    """
    _, index, sizes = torch.unique(batch["group"], return_inverse=True, return_counts=True)
    rates = torch.empty(len(scores), dtype=torch.float64, device=scores.device)
    for rows in index.argsort(stable=True).split(sizes.tolist()):
        rates[rows] = wins(scores[rows, None], scores[rows], softness).mean(1)
    return {"advantages": spread(rates - 0.5, scores, batch)}


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
