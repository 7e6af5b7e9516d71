"""Advantages from the rewards that follow a token. A step is a trained token: whatever lies between two of them (tool
output, a rejected token) is skipped and takes no discount.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.registries import ADVANTAGES, AllSum
from rft.algorithm.whiten import whitened


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, gamma: float
) -> dict[str, Tensor]:
    """G_t = r_t + gamma G_{t+1}, whitened over the trained tokens of all ranks. REINFORCE++, arXiv 2501.03262.

    Args:
        gamma: discount per trained token.
    """
    keep = batch["keep"]
    following = estimate(rewards, torch.zeros_like(rewards), keep, gamma, lam=1.0)
    return {"advantages": whitened(following, keep, all_sum)}


@ADVANTAGES.register("gae", reads=("values",), writes=("advantages", "returns"))
def gae(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, gamma: float, lam: float, whiten: bool
) -> dict[str, Tensor]:
    """delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}. GAE, arXiv 1506.02438, section 3.

    The value after the last trained token is 0. `returns` is A + V, before the whitening.

    Args:
        gamma: discount per trained token.
        lam: between 0 (one step) and 1 (the return less the value).
        whiten: whitens the advantages over the trained tokens of all ranks.
    """
    keep, values = batch["keep"], batch["values"]
    advantages = estimate(rewards, values, keep, gamma, lam)
    returns = torch.where(keep, advantages + values, 0.0)
    return {"advantages": whitened(advantages, keep, all_sum) if whiten else advantages, "returns": returns}


def estimate(rewards: Tensor, values: Tensor, keep: Tensor, gamma: float, lam: float) -> Tensor:
    """The recursion of `gae` over the trained tokens, (B, T), zero outside `keep`.

    Trained tokens are moved together, so that the loop over time knows no gaps and is as long as the longest of them.
    With values of 0 and lam of 1 it is the discounted sum of rewards.
    """
    longest = int(keep.sum(dim=1).max())
    order = keep.int().argsort(dim=1, descending=True, stable=True)[:, :longest]  # (B, L)
    reward = torch.where(keep, rewards.double(), 0.0).gather(1, order)  # (B, L)
    value = torch.where(keep, values.double(), 0.0).gather(1, order)  # (B, L)
    steps = torch.zeros_like(reward)
    advantage = following = reward.new_zeros(len(reward))  # (B,)
    for t in reversed(range(longest)):  # behind a row's last trained token everything is 0 and stays 0
        advantage = reward[:, t] + gamma * following - value[:, t] + gamma * lam * advantage
        following = value[:, t]
        steps[:, t] = advantage
    return torch.zeros_like(rewards).scatter(1, order, steps.to(rewards.dtype))
