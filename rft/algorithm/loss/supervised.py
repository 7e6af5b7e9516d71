"""Losses whose target is given at every token: the token itself, or the return."""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import LOSSES, Gradient, Unreduced
from rft.ranges import NonNegativeFloat


@LOSSES.register("nll", gradient=Gradient("exact", target="likelihood"))
def nll(logprobs: Tensor, batch: TensorDict) -> Unreduced:
    """-log p of every trained token (B, T)."""
    return torch.where(batch["loss_mask"], -logprobs, 0.0), {}


@LOSSES.register(
    "value",
    reads=("values", "returns"),
    idle_on_policy=("clip",),
    outputs=("values",),
    head="value",
    gradient=Gradient("exact", target="value error"),
)
def value(values: Tensor, batch: TensorDict, *, clip: NonNegativeFloat | None) -> Unreduced:
    """0.5 max((V - G)^2, (V_old + clip(V - V_old, +-c) - G)^2) per token (B, T).

    The value clipping of PPO as in OpenAI baselines, `ppo2`.

    Statistics: `clip/value` (1 where the clipped error is the larger one), absent without clipping.

    Args:
        clip: c, how far a value may move within a step; null for the plain squared error.
    """
    keep = batch["loss_mask"]
    old, returns = batch["values"], batch["returns"]  # (B, T)
    plain = torch.where(keep, values - returns, 0.0).square()
    if clip is None:
        return 0.5 * plain, {}
    near = torch.where(keep, old + (values - old).clamp(-clip, clip) - returns, 0.0).square()
    clipped = (near > plain) & ((values - old).abs() > clip)  # within the clip the two differ by rounding alone
    return 0.5 * torch.maximum(plain, near), {"clip/value": clipped.to(values.dtype)}
