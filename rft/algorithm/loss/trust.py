"""Policy losses with a trust region: a token that has left it, and would go further, gets no gradient.

DPPO, arXiv 2602.04879. A ratio is a poor measure of how far a distribution has moved: that of a rare token doubles
after a small change. These losses use the probability of the sampled token instead: its change bounds the divergence of
the whole distribution from below.
"""

from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.gradient import Gradient
from rft.algorithm.kl import binary_kl, k3
from rft.algorithm.loss.soft import anchored, anchored_idle, reinforced
from rft.algorithm.ratio import log_ratio, ratio
from rft.algorithm.registries import LOSSES, Unreduced
from rft.ranges import NonNegativeFloat, PositiveFloat


@LOSSES.register(
    "dppo_tv",
    reads=anchored,
    idle_on_policy=anchored_idle("clip_low", "clip_high"),
    gradient=Gradient("exact"),
)
def dppo_tv(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    clip_low: NonNegativeFloat,
    clip_high: NonNegativeFloat,
    ratio_cap: PositiveFloat,
    anchor: Literal["old", "rollout"],
) -> Unreduced:
    """-A sg(min(r, cap)) lp per token, 0 where A > 0 and p - p_anchor > high, or A < 0 and p - p_anchor < -low.

    DPPO with the binary total variation |p - p_anchor| of the sampled token.

    Statistics: `clip/low`, `clip/high` (1 where A < 0, where A > 0 and the gradient is taken away), and the k3 estimate
    of the KL divergence of the anchor from the current policy, `kl/old` or `kl/rollout`.

    Args:
        clip_low, clip_high: how far a probability may fall, and rise.
        ratio_cap: the largest weight of a token.
        anchor: the centre of the trust region, and the policy that r is the ratio to.
    """
    now, then = (_kept(column, batch).exp() for column in (logprobs, batch[f"{anchor}_logprobs"]))  # (B, T)
    return _trusted(logprobs, batch, now - then < -clip_low, now - then > clip_high, ratio_cap, anchor)


@LOSSES.register(
    "dppo_kl",
    reads=anchored,
    idle_on_policy=anchored_idle("max_kl"),
    gradient=Gradient("exact"),
)
def dppo_kl(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    max_kl: NonNegativeFloat,
    ratio_cap: PositiveFloat,
    anchor: Literal["old", "rollout"],
) -> Unreduced:
    """-A sg(min(r, cap)) lp per token, 0 where the binary KL exceeds `max_kl` and the step would widen it.

    DPPO with the KL divergence of (p_anchor, 1 - p_anchor) from (p, 1 - p), p of the sampled token. A step widens it
    where A > 0 and p > p_anchor, or A < 0 and p < p_anchor. Statistics as `dppo_tv`.

    Args:
        max_kl: the radius of the trust region, in nats.
        ratio_cap: the largest weight of a token.
        anchor: the centre of the trust region, and the policy that r is the ratio to.
    """
    now, then = (_kept(column, batch) for column in (logprobs, batch[f"{anchor}_logprobs"]))  # (B, T)
    outside = binary_kl(then, now) > max_kl
    return _trusted(logprobs, batch, outside & (now < then), outside & (now > then), ratio_cap, anchor)


def _kept(logprobs: Tensor, batch: TensorDict) -> Tensor:
    """Without a gradient, 0 outside `loss_mask`, float32 at least."""
    logprobs = logprobs.detach().to(torch.promote_types(logprobs.dtype, torch.float32))
    return torch.where(batch["loss_mask"], logprobs, 0.0)


def _trusted(
    logprobs: Tensor, batch: TensorDict, fallen: Tensor, risen: Tensor, ratio_cap: float, anchor: str
) -> Unreduced:
    """-A sg(min(r, cap)) lp except where A < 0 and p has `fallen`, or A > 0 and p has `risen`, too far."""
    advantages = torch.where(batch["loss_mask"], batch["advantages"], 0.0)
    low, high = (advantages < 0) & fallen, (advantages > 0) & risen
    difference = log_ratio(logprobs.detach(), batch[f"{anchor}_logprobs"], batch["loss_mask"])  # (B, T)
    weight = torch.where(low | high, 0.0, ratio(difference).clamp(max=ratio_cap))
    statistics = {"clip/low": low.to(weight.dtype), "clip/high": high.to(weight.dtype), f"kl/{anchor}": k3(-difference)}
    return reinforced(logprobs, batch, weight), statistics
