"""Advantages of single turns of a dialogue."""

from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import ADVANTAGES, Gradient
from rft.algorithm.advantage.group import EPSILON, spread
from rft.algorithm.scores.groups import group_statistics
from rft.ranges import Fraction, NonNegativeFloat, NonNegativeInt


def _gradient_of_gigpo(scale: str, omega: float) -> Gradient:
    if scale == "none":
        note = "of one turn; with several the cosine is .997, as returns of other turns in the state are the baseline"
        return Gradient("scaled", factor=lambda n: (1 + omega) * (n - 1) / n, note=note)
    return Gradient("near", cosine=0.982, note="of one turn as group_norm; graded scores change its direction")


@ADVANTAGES.register("gigpo", reads=("turn", "anchor"), group_baseline=True, gradient=_gradient_of_gigpo)
def gigpo(
    scores: Tensor,
    rewards: Tensor,
    batch: TensorDict,
    *,
    omega: NonNegativeFloat,
    discount: Fraction,
    scale: Literal["group", "none"],
) -> dict[str, Tensor]:
    """(R - mean_g) / F + omega (R_k - mean_s) / F_s at the tokens of turn k. GiGPO, arXiv 2505.10978, section 4.

    R_k = sum_{j >= k} discount^(j - k) r_j is the return of the turn, r_j the sum of the rewards of turn j. mean_s is
    over the turns of the group that began in the same state of the environment, in the same trajectory or in another.
    A turn in a state that the group met once, or whose state is not known, has the first summand alone.

    Args:
        batch: with `turn` and `anchor`, (B, T): a hash of the state before the turn, 0 where it is not known.
        omega: weight of the second summand.
        discount: per turn.
        scale: F and F_s. group: standard deviation of R in the group and of R_k in the state (ddof 1) + 1e-6; none: 1.
    """
    turn, returns, anchor = _turns(rewards, batch, discount)
    known = anchor != 0
    states = _number(batch["group"][:, None].expand_as(anchor)[known], anchor[known])
    step = torch.zeros_like(returns)
    step[known] = _compared(returns[known], states, scale)
    total = spread(_compared(scores, batch["group"], scale), scores, batch).double() + omega * step.gather(1, turn)
    return {"advantages": total.to(scores.dtype)}


def _gradient_of_hgpo(scale: str) -> Gradient:
    if scale == "none":
        note = "of one turn; with several, returns of other turns in the state are the baseline"
        return Gradient("scaled", factor=lambda n: (n - 1) / n, note=note)
    return Gradient("near", cosine=0.982, note="of one turn as group_norm")


@ADVANTAGES.register("hgpo", reads=("turn", "anchor"), group_baseline=True, gradient=_gradient_of_hgpo)
def hgpo(
    scores: Tensor,
    rewards: Tensor,
    batch: TensorDict,
    *,
    history: NonNegativeInt,
    alpha: NonNegativeFloat,
    discount: Fraction,
    scale: Literal["group", "none"],
) -> dict[str, Tensor]:
    """sum_k w_k (R_t - mean_k) / F_k at the tokens of turn t. HGPO, arXiv 2602.22817, section 4.

    R_t is the return of the turn as in `gigpo`. mean_k, of k = 1, ..., history + 1, is over the turns of the group with
    the same last k states. w_k is k^alpha over the sum of these numbers; a k for which the turn is alone is left out. A
    turn without another one in its state has the advantage 0.

    Args:
        batch: with `turn` and `anchor`, as for `gigpo`.
        history: states before that of the turn that are compared at most.
        alpha: how much more a longer common history counts; 0: all count alike.
        discount: per turn.
        scale: F_k. group: standard deviation of the returns that are compared (ddof 1) + 1e-6; none: 1.
    """
    turn, returns, anchor = _turns(rewards, batch, discount)
    total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
    before = batch["group"][:, None].expand_as(anchor)  # what came before the state; -1 where it is not known
    for k in range(1, history + 2):
        known = (anchor != 0) & (before >= 0)
        same = torch.full_like(anchor, -1)
        same[known] = _number(before[known], anchor[known])
        weight = float(k) ** alpha * (group_statistics(returns[known], same[known]).size > 1)
        total[known] += weight * _compared(returns[known], same[known], scale)
        weights[known] += weight
        before = same.roll(1, dims=1)  # that of the turn before; column 0 has no state
    step = torch.where(weights > 0, total / weights, 0.0)
    return {"advantages": step.gather(1, turn).to(scores.dtype)}


def _turns(rewards: Tensor, batch: TensorDict, discount: float) -> tuple[Tensor, Tensor, Tensor]:
    """The number of the turn of each token that trains, 0 for others, (B, T); the return of each turn in float64 and
    the state before it, 0 where it is not known, (B, 1 + turns): turn k in column k."""
    turn = torch.where(batch["loss_mask"], batch["turn"], 0)
    size = (len(turn), 1 + (int(turn.max()) if turn.numel() else 0))  # column 0: the tokens that do not train
    reward = rewards.new_zeros(size, dtype=torch.float64).scatter_add(1, turn, rewards.double())
    anchor = turn.new_zeros(size).scatter(1, turn, batch["anchor"])
    anchor[:, 0] = 0
    returns, after = torch.zeros_like(reward), torch.zeros_like(reward[:, 0])
    for k in reversed(range(1, size[1])):
        after = reward[:, k] + discount * after
        returns[:, k] = after
    return turn, returns, anchor


def _number(*columns: Tensor) -> Tensor:
    """The numbers of the different rows of some columns, from 0, each (N,)."""
    return torch.stack(columns).unique(dim=1, return_inverse=True)[1]


def _compared(values: Tensor, group: Tensor, scale: str) -> Tensor:
    statistics = group_statistics(values, group)
    return statistics.centred / (statistics.std + EPSILON) if scale == "group" else statistics.centred
