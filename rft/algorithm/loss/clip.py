"""Policy losses that clip a ratio to the old policy."""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.kl import k3
from rft.algorithm.ratio import log_ratio, ratio
from rft.algorithm.registries import LOSSES, Unreduced


@LOSSES.register("ppo_clip", reads=("old_logprobs", "advantages"))
def ppo_clip(
    logprobs: Tensor, batch: TensorDict, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Unreduced:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) per token. PPO, arXiv 1707.06347, equation 7.

    Statistics: `clip/low`, `clip/high` (1 where that side takes the gradient away; `clip/high` counts the dual clip
    too), `kl/old` (k3 estimate of the KL divergence of the old from the current policy).

    Args:
        clip_low, clip_high: the ratio is clipped to [1 - low, 1 + high]; unequal they are DAPO's clip-higher
            (arXiv 2503.14476).
        dual_clip: c > 1; where A < 0 the loss is at most -A c (arXiv 1912.09729); null turns it off.
    """
    difference = log_ratio(logprobs, batch["old_logprobs"], batch["keep"])  # (B, T)
    return clipped(ratio(difference), difference, batch, clip_low, clip_high, dual_clip)


@LOSSES.register("gspo", reads=("old_logprobs", "advantages"))
def gspo(logprobs: Tensor, batch: TensorDict, *, clip_low: float, clip_high: float) -> Unreduced:
    """ppo_clip on the ratio of the sequence, s = exp(mean over trained tokens of the log-ratio).

    GSPO, arXiv 2507.18071, in the token form of section 4.3: every token carries the value s, and the gradient of its
    own log-probability. Statistics as `ppo_clip`.

    Args:
        clip_low, clip_high: s is clipped to [1 - low, 1 + high].
    """
    keep = batch["keep"]
    difference = log_ratio(logprobs, batch["old_logprobs"], keep)  # (B, T)
    mean = difference.sum(dim=1, keepdim=True) / keep.sum(dim=1, keepdim=True).clamp(min=1)  # (B, 1)
    sequence = ratio(mean.detach()) * (difference - difference.detach()).exp()  # (B, T)
    return clipped(sequence, difference, batch, clip_low, clip_high, dual_clip=None)


def clipped(
    r: Tensor, log_ratios: Tensor, batch: TensorDict, clip_low: float, clip_high: float, dual_clip: float | None
) -> Unreduced:
    """The clipped surrogate of the ratios r, and its statistics; every tensor is (B, T) and zero outside `keep`.

    Where nothing is clipped both arms of the maximum are equal, and each passes half the gradient.
    """
    advantages = torch.where(batch["keep"], batch["advantages"], 0.0)
    better, worse = advantages > 0, advantages < 0
    loss = torch.maximum(-advantages * r, -advantages * r.clamp(1 - clip_low, 1 + clip_high))
    low, high = worse & (r < 1 - clip_low), better & (r > 1 + clip_high)
    if dual_clip is not None:
        loss = torch.where(worse, torch.minimum(loss, -advantages * dual_clip), loss)
        high = high | (worse & (r > dual_clip))
    statistics = {"clip/low": low.to(loss.dtype), "clip/high": high.to(loss.dtype), "kl/old": k3(-log_ratios.detach())}
    return loss, statistics
