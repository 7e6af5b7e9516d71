"""From one score a row to one reward a token."""

import torch
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
