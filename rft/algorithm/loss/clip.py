"""Policy losses that clip the ratio of every token to the old policy, and are pessimistic about the clip."""

from typing import Annotated

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import LOSSES, Gradient, Unreduced
from rft.algorithm.divergence import k3, log_ratio, ratio
from rft.ranges import ClipBound, Fraction, Range


@LOSSES.register(
    "ppo_clip",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("clip_low", "clip_high", "dual_clip"),
    gradient=Gradient("exact"),
)
def ppo_clip(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    clip_low: Fraction,
    clip_high: ClipBound,
    dual_clip: Annotated[float, Range(above=1)] | None,
) -> Unreduced:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) per token. PPO, arXiv 1707.06347, equation 7.

    Statistics: `clip/low`, `clip/high` (1 where that side takes the gradient away; `clip/high` counts the dual clip
    too), `kl/old` (k3 estimate of the KL divergence of the old from the current policy).

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high]; unequal they are DAPO's clip-higher
            (arXiv 2503.14476).
        dual_clip: c > 1; where A < 0 the loss is at most -A c (arXiv 1912.09729); null turns it off.
    """
    difference = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    return clipped(ratio(difference), difference, batch, clip_low, clip_high, dual_clip)


def clipped(
    r: Tensor, log_ratios: Tensor, batch: TensorDict, clip_low: float, clip_high: float, dual_clip: float | None
) -> Unreduced:
    """The clipped surrogate of the ratios r, and its statistics; all are (B, T) and zero outside `loss_mask`."""
    loss, low, high = pessimistic(r, batch, 1 - clip_low, 1 + clip_high)
    if dual_clip is not None:
        advantages = torch.where(batch["loss_mask"], batch["advantages"], 0.0)
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
        high = high | ((advantages < 0) & (r > dual_clip))
    return loss, clip_statistics(low, high, log_ratios)


def clip_statistics(low: Tensor, high: Tensor, log_ratios: Tensor) -> dict[str, Tensor]:
    """`clip/low`, `clip/high` and `kl/old`, each (B, T), of two masks and the log-ratios to the old policy."""
    log_ratios = log_ratios.detach()
    return {"clip/low": low.to(log_ratios.dtype), "clip/high": high.to(log_ratios.dtype), "kl/old": k3(-log_ratios)}


def pessimistic(x: Tensor, batch: TensorDict, floor: float, ceiling: float) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A x, -A clip(x, floor, ceiling)), and where the floor, where the ceiling takes the gradient away.

    Where nothing is clipped both arms of the maximum are equal, and each passes half the gradient.
    """
    advantages = torch.where(batch["loss_mask"], batch["advantages"], 0.0)
    loss = torch.maximum(-advantages * x, -advantages * x.clamp(floor, ceiling))
    return loss, (advantages < 0) & (x < floor), (advantages > 0) & (x > ceiling)
