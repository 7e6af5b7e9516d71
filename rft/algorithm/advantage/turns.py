"""Advantages of single turns of a dialogue."""

from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.advantage.group import EPSILON, spread
from rft.algorithm.gradient import Gradient
from rft.algorithm.registries import ADVANTAGES
from rft.algorithm.scores.groups import group_statistics
from rft.ranges import Fraction, NonNegativeFloat


def _gradient_of_gigpo(options: dict[str, Any]) -> Gradient:
    if options["scale"] == "none":
        note = "of one turn; with several the cosine is .997, as returns of other turns in the state are the baseline"
        return Gradient("scaled", factor=lambda n: (1 + options["omega"]) * (n - 1) / n, note=note)
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

    def compared(values: Tensor, group: Tensor) -> Tensor:
        found = group_statistics(values, group)
        return found.centred / (found.std + EPSILON) if scale == "group" else found.centred

    keep = batch["loss_mask"]
    turn = torch.where(keep, batch["turn"], 0)  # (B, T)
    size = (len(turn), 1 + (int(turn.max()) if turn.numel() else 0))
    reward = rewards.new_zeros(size, dtype=torch.float64).scatter_add(1, turn, torch.where(keep, rewards, 0.0).double())
    anchor = turn.new_zeros(size).scatter(1, turn, torch.where(keep, batch["anchor"], 0))  # (B, turns + 1)
    returns, after = torch.zeros_like(reward), reward[:, 0] * 0
    for k in reversed(range(1, size[1])):
        after = reward[:, k] + discount * after
        returns[:, k] = after
    known = anchor != 0
    known[:, 0] = False  # the tokens that do not train
    states = torch.stack([batch["group"][:, None].expand(size)[known], anchor[known]])  # (2, turns of a known state)
    step = torch.zeros_like(reward)
    step[known] = compared(returns[known], states.unique(dim=1, return_inverse=True)[1])
    total = spread(compared(scores, batch["group"]), scores, batch).double() + omega * step.gather(1, turn)
    return {"advantages": torch.where(keep, total, 0.0).to(scores.dtype)}
