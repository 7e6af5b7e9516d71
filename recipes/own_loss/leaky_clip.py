"""A loss and a reward of one's own. Importing this file registers them: `plugins: [leaky_clip]` in run.yaml does so."""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import LOSSES, Gradient
from rft.reward import REWARDS


@LOSSES.register("leaky_clip", reads=("old_logprobs", "advantages"), gradient=Gradient("exact"))
def leaky_clip(logprobs: Tensor, batch: TensorDict, *, clip: float, leak: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Like PPO's clipped ratio, but beyond the bound a share `leak` of the slope remains. (B, T) -> (B, T)

    Args:
        logprobs: (B, T), of the sampled tokens under the current policy.
        batch: with `old_logprobs`, `advantages` and `loss_mask`, (B, T) each.
        clip: the ratio moves freely within 1 - clip and 1 + clip.
        leak: slope beyond, between 0 (PPO) and 1 (no clipping).
    """
    advantages, keep = batch["advantages"], batch["loss_mask"]
    ratio = torch.where(keep, logprobs - batch["old_logprobs"], 0.0).clamp(-20, 20).exp()  # (B, T)
    bounded = ratio.clamp(1 - clip, 1 + clip)
    leaky = bounded + leak * (ratio - bounded)
    beyond = torch.where(advantages > 0, ratio > 1 + clip, ratio < 1 - clip)
    return -advantages * torch.where(beyond, leaky, ratio), {"clip/leaky": beyond.float()}


@REWARDS.register("digits_right", reads=("answer",))
def digits_right(response: str, row: Mapping[str, Any]) -> float:
    """The share of places that hold the right character."""
    answer = str(row["answer"])
    right = sum(mine == theirs for mine, theirs in zip(response, answer, strict=False))
    return right / max(len(response), len(answer), 1)
