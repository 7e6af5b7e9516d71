"""Advantages from the rewards that follow a token. A step is a trained token: whatever lies between two of them (tool
output, a rejected token) is skipped and takes no discount.
"""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.registries import ADVANTAGES, AllSum
from rft.algorithm.whiten import whiten


@ADVANTAGES.register("reinforce_pp")
def reinforce_pp(
    scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum, gamma: float
) -> dict[str, Tensor]:
    """G_t = r_t + gamma G_{t+1}, whitened over the trained tokens of all ranks. REINFORCE++, arXiv 2501.03262.

    Args:
        gamma: discount per trained token.
    """
    keep = batch["keep"]
    return {"advantages": whiten(_discount(rewards, keep, gamma), keep, all_sum)}


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
    keep = batch["keep"]
    values = torch.where(keep, batch["values"], 0.0)  # (B, T)
    # sum_k (gamma lam)^k delta_{t+k} = sum_k (gamma lam)^k [r + gamma (1 - lam) V_next]_{t+k} - V_t, of which one
    # discounted sum is left to compute: that of the rewards with the bootstrapped part of the next value.
    returns = _discount(rewards + gamma * (1 - lam) * _following(values, keep), keep, gamma * lam)
    advantages = torch.where(keep, returns - values, 0.0)
    if whiten:
        advantages = whiten_tokens(advantages, keep, all_sum)
    return {"advantages": advantages, "returns": returns}
