"""The rewards of the tokens of a row, from its score and from those of its turns."""

import torch
from tensordict import TensorDict
from torch import Tensor


def token_rewards(scores: Tensor, keep: Tensor, kl: Tensor | None, coef: float) -> tuple[Tensor, Tensor]:
    """Places the score at the last trained token and subtracts coef * KL from every trained token.

    Args:
        scores: (B,) after shaping.
        keep: (B, T) bool, the trained tokens.
        kl: (B, T) estimate per token (`kl_penalty`), or None where KL is not in the reward.
        coef: beta, of the KL; not used where `kl` is None.

    Returns:
        The row scalar (B,), score - coef * sum of KL, and the rewards (B, T), which sum to it in every row that has a
        trained token and are zero outside `loss_mask`.
    """
    columns = torch.arange(keep.shape[1], device=keep.device)
    last = torch.where(keep, columns, -1).amax(dim=1, keepdim=True)  # (B, 1), -1 where nothing is trained
    rewards = torch.where(columns == last, scores[:, None], 0.0)  # (B, T)
    if kl is None:
        return scores, rewards
    penalty = coef * torch.where(keep, kl, 0.0)  # (B, T)
    return scores - penalty.sum(dim=1), rewards - penalty


def add_turn_rewards(
    scores: Tensor, rewards: Tensor, batch: TensorDict, discount: float, weight: float
) -> tuple[Tensor, Tensor]:
    """Adds weight * discount^(k - 1) * the reward of turn k to the row scalar and to the rewards.

    What estimates the gradient of the score then estimates that of score + weight * sum_k discount^(k - 1) r_k. A
    reward whose token was rejected moves to the trained token before it. Rewards before the first trained token are
    left out: no trained token has an effect on them.

    Args:
        scores, rewards: as `token_rewards` returns them, (B,) and (B, T).
        batch: with `turn`, `turn_scores` and `loss_mask`, (B, T) each.

    Returns:
        As `token_rewards`.
    """
    keep, turn = batch["loss_mask"], batch["turn"]
    columns = torch.arange(keep.shape[1], device=keep.device)
    place = torch.where(keep, columns, -1).cummax(dim=1).values  # (B, T), -1 before the first trained token
    added = weight * discount ** (turn - 1).clamp(min=0).double() * batch["turn_scores"]
    added = torch.where(place < 0, 0.0, added).to(rewards.dtype)
    return scores + added.sum(dim=1), rewards.scatter_add(1, place.clamp(min=0), added)
