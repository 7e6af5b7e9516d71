"""Policy losses of the form -A w lp, whose weight w passes no gradient, and others that bound a step without a clip.

Those with a trust region, DPPO, arXiv 2602.04879, give no gradient to a token that has left it and would go further. A
ratio is a poor measure of how far a distribution has moved: that of a rare token doubles after a small change. They use
the probability of the sampled token instead: its change bounds the divergence of the whole distribution from below.
"""

from collections.abc import Callable
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import LOSSES, Gradient, Unreduced
from rft.algorithm.divergence import binary_kl, k3, log_ratio, ratio
from rft.ranges import ClipBound, Fraction, NonNegativeFloat, PositiveFloat


def anchored(anchor: str) -> tuple[str, ...]:
    """What a loss with the option `anchor` reads."""
    return (f"{anchor}_logprobs", "advantages")


def anchored_idle(*names: str) -> Callable[[str], tuple[str, ...]]:
    """The options `names` change no gradient where current and old policy are one; with another anchor all may."""
    return lambda anchor: names if anchor == "old" else ()


def reinforced(logprobs: Tensor, batch: TensorDict, weight: Tensor | float) -> Tensor:
    """-A w lp at the trained tokens, 0 elsewhere (B, T); float32 at least. The weight must not carry a gradient."""
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    keep = batch["loss_mask"]
    return -torch.where(keep, batch["advantages"] * weight, 0.0) * torch.where(keep, logprobs, 0.0)


@LOSSES.register("reinforce", reads=("advantages",), gradient=Gradient("exact"))
def reinforce(logprobs: Tensor, batch: TensorDict) -> Unreduced:
    """-A lp per token. Williams 1992, doi 10.1007/BF00992696. No statistics, as it reads no other policy."""
    return reinforced(logprobs, batch, 1.0), {}


@LOSSES.register(
    "cispo",
    reads=anchored,
    idle_on_policy=anchored_idle("clip_low", "clip_high"),
    gradient=Gradient("exact"),
)
def cispo(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    clip_low: Fraction | None,
    clip_high: ClipBound,
    anchor: Literal["old", "rollout"],
) -> Unreduced:
    """-A sg(clip(r, 1 - low, 1 + high)) lp per token: a clipped weight, and no token without a gradient.

    CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5.

    Statistics: `clip/low`, `clip/high` (1 where the weight is on that bound, whatever the sign of A), and the k3
    estimate of the KL divergence of the anchor from the current policy, `kl/old` or `kl/rollout`.

    Args:
        clip_low: the weight is at least 1 - low; null for no lower bound.
        clip_high: the weight is at most 1 + high. Other libraries take the bound itself: 4 here is 5 there.
        anchor: the policy that r is the ratio to: the proximal one, or the one that sampled.
    """
    difference = log_ratio(logprobs.detach(), batch[f"{anchor}_logprobs"], batch["loss_mask"])  # (B, T)
    r = ratio(difference)
    floor, ceiling = (0.0 if clip_low is None else 1 - clip_low), 1 + clip_high
    statistics = {
        "clip/low": (r < floor).to(r.dtype),
        "clip/high": (r > ceiling).to(r.dtype),
        f"kl/{anchor}": k3(-difference),
    }
    return reinforced(logprobs, batch, r.clamp(floor, ceiling)), statistics


@LOSSES.register(
    "sapo",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("tau_positive", "tau_negative"),
    gradient=Gradient("exact"),
)
def sapo(logprobs: Tensor, batch: TensorDict, *, tau_positive: PositiveFloat, tau_negative: PositiveFloat) -> Unreduced:
    """-A (4 / tau) sigmoid(tau (r - 1)) per token, tau by the sign of A: a gate that closes smoothly on both sides.

    SAPO, arXiv 2511.20347. At r = 1 the slope of the gate is 1.

    Statistics: `kl/old`, as `ppo_clip`.

    Args:
        tau_positive: how fast the gate closes where A > 0.
        tau_negative: the same where A <= 0; larger, as those tokens make training less stable.
    """
    difference = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    advantages = torch.where(batch["loss_mask"], batch["advantages"], 0.0)
    tau = torch.where(advantages > 0, tau_positive, tau_negative)
    gate = torch.sigmoid(tau * (ratio(difference) - 1)) * 4 / tau
    return -advantages * gate, {"kl/old": k3(-difference.detach())}


@LOSSES.register(
    "dro",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("beta", "level"),
    gradient=Gradient("exact"),
)
def dro(logprobs: Tensor, batch: TensorDict, *, beta: NonNegativeFloat, level: Literal["token", "row"]) -> Unreduced:
    """-(A lp - beta / 2 l^2) per token, l the log-ratio to the old policy.

    DRO, arXiv 2405.19107, whose regression (R - V - beta l)^2 / 2 has this gradient, divided by beta; V is
    part of the advantage.

    Statistics: `kl/old`, as `ppo_clip`.

    Args:
        beta: strength of the pull to the old policy.
        level: `row`: the square is that of the row's sum of l, as in the paper, each token with its share; `token`: of
            every token's own l.
    """
    return _pulled(logprobs, batch, beta, level)


@LOSSES.register(
    "kimi",
    reads=("old_logprobs", "advantages"),
    idle_on_policy=("tau", "level"),
    gradient=Gradient("exact"),
)
def kimi(logprobs: Tensor, batch: TensorDict, *, tau: NonNegativeFloat, level: Literal["token", "row"]) -> Unreduced:
    """-A lp + tau / 2 l^2 per token, l the log-ratio to the old policy: policy mirror descent.

    Kimi k1.5, arXiv 2501.12599, section 2.3. The same function as `dro`; the papers differ in the baseline.

    Statistics: `kl/old`, as `ppo_clip`.

    Args:
        tau: strength of the pull to the old policy.
        level: `row`: the square is that of the row's sum of l, as in the paper, each token with its share; `token`: of
            every token's own l.
    """
    return _pulled(logprobs, batch, tau, level)


def _pulled(logprobs: Tensor, batch: TensorDict, strength: float, level: str) -> Unreduced:
    difference = log_ratio(logprobs, batch["old_logprobs"], batch["loss_mask"])  # (B, T)
    total = difference.sum(dim=1, keepdim=True) if level == "row" else difference
    loss = reinforced(logprobs, batch, 1.0) + 0.5 * strength * total * difference
    return loss, {"kl/old": k3(-difference.detach())}


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
