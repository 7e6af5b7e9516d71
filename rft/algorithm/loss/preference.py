"""Losses of preferences: of pairs, a chosen and a rejected answer to one prompt, and of single answers with a label or
a win rate.

The value of a pair stands in both of its rows, and so do its statistics: their mean over rows is that over pairs.
"""

from collections.abc import Callable
from typing import Annotated, Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from rft.algorithm import LOSSES, AllSum, Gradient, Unreduced
from rft.algorithm.divergence import k3, log_ratio
from rft.algorithm.scores.groups import both
from rft.algorithm.token_weights.aggregation import divisor, row_mean, tokens_of_rows
from rft.ranges import NonNegativeFloat, PositiveFloat, Range


def gradient(slope: float, average: bool = False) -> Gradient:
    """The gradient of a loss of beta * h: while policy and reference are equal, all pairs have the same factor."""
    target = "mean margin of pairs" if average else "margin of pairs"
    return Gradient("scaled", target, lambda n: slope, note="while the policy equals the reference")


EVALUATED = ("preference/accuracy", "preference/margin")  # on held-out pairs
OF_PAIRS: dict[str, Any] = {"unit": "pair", "statistics": EVALUATED}
# The assumed share of swapped labels: at one half the labels carry no information.
Noise = Annotated[float, Range(low=0, below=0.5)]


@LOSSES.register(
    "dpo",
    reads=("ref_logprobs", "chosen"),
    **OF_PAIRS,
    gradient=lambda beta, label_smoothing: gradient(beta * (0.5 - label_smoothing)),
)
def dpo(logprobs: Tensor, batch: TensorDict, *, beta: PositiveFloat, label_smoothing: Noise) -> Unreduced:
    """-(1 - e) ln sigmoid(beta h) - e ln sigmoid(-beta h) per pair, h = gain of the chosen - gain of the rejected row.

    The gain of a row is the sum of its log-ratios to the reference. DPO, arXiv 2305.18290, equation 7; e is the noise
    of the labels in cDPO, of Mitchell's note "A note on DPO with noisy preferences".

    Statistics (B,): `preference/accuracy` (1 where h > 0), `preference/margin` (beta h), `preference/reward_chosen`,
    `preference/reward_rejected` (beta * gain), `preference/logprob_chosen`, `preference/logprob_rejected` (of the whole
    response).

    Args:
        beta: strength of the pull to the reference.
        label_smoothing: e, the assumed share of the pairs whose labels are swapped, below 0.5.
    """
    return compare(beta * gain(logprobs, batch), logprobs, batch, lambda margin: _smooth(margin, label_smoothing))


@LOSSES.register(
    "robust_dpo",
    reads=("ref_logprobs", "chosen"),
    **OF_PAIRS,
    gradient=lambda beta, label_smoothing: gradient(beta / (2 - 4 * label_smoothing)),
)
def robust_dpo(logprobs: Tensor, batch: TensorDict, *, beta: PositiveFloat, label_smoothing: Noise) -> Unreduced:
    """(-(1 - e) ln sigmoid(beta h) + e ln sigmoid(-beta h)) / (1 - 2 e) per pair: unbiased where labels flip.

    Robust DPO, arXiv 2403.00409, equation 12: its mean over labels of which a share e is swapped is that of `dpo`
    over the right ones. Statistics as `dpo`.

    Args:
        beta: strength of the pull to the reference.
        label_smoothing: e, the share of the pairs whose labels are swapped, below 0.5.
    """
    e = label_smoothing

    def unbiased(margin: Tensor) -> Tensor:
        return (e * logsigmoid(-margin) - (1 - e) * logsigmoid(margin)) / (1 - 2 * e)

    return compare(beta * gain(logprobs, batch), logprobs, batch, unbiased)


@LOSSES.register(
    "ipo",
    reads=("ref_logprobs", "chosen"),
    **OF_PAIRS,
    gradient=lambda beta, average: gradient(1 / beta, average),
)
def ipo(logprobs: Tensor, batch: TensorDict, *, beta: PositiveFloat, average: bool) -> Unreduced:
    """(h - 1 / (2 beta))^2 per pair, h as in `dpo`: a margin that is large enough is not widened.

    IPO, arXiv 2310.12036, equation 17. Statistics as `dpo`.

    Args:
        beta: the margin aimed at is 1 / (2 beta), tau of the paper.
        average: h is the difference of the means over the tokens of a row, as in some libraries; the paper's is
            that of sums.
    """
    gains = gain(logprobs, batch)
    rewards = beta * (gains / divisor(tokens_of_rows(batch)) if average else gains)
    return compare(rewards, logprobs, batch, lambda margin: ((margin - 0.5) / beta).square())


@LOSSES.register(
    "hinge",
    reads=("ref_logprobs", "chosen"),
    **OF_PAIRS,
    gradient=lambda beta: gradient(beta),
)
def hinge(logprobs: Tensor, batch: TensorDict, *, beta: PositiveFloat) -> Unreduced:
    """max(0, 1 - beta h) per pair, h as in `dpo`: SLiC, arXiv 2305.10425, with the reference of RSO, arXiv 2309.06657.

    Statistics as `dpo`.

    Args:
        beta: the margin aimed at is 1 / beta.
    """
    return compare(beta * gain(logprobs, batch), logprobs, batch, lambda margin: (1 - margin).relu())


@LOSSES.register(
    "cpo",
    reads=("chosen",),
    **OF_PAIRS,
    gradient=Gradient("near", "margin of pairs", cosine=0.996),
)
def cpo(logprobs: Tensor, batch: TensorDict, *, beta: PositiveFloat) -> Unreduced:
    """-ln sigmoid(beta (lp of the chosen - lp of the rejected response)) per pair: `dpo` without a reference.

    CPO, arXiv 2401.08417, equation 4; the likelihood of the chosen, its other half, is the term `chosen_nll`.
    Statistics as `dpo`, the reward being beta * lp.

    Args:
        beta: the larger, the sooner a pair is right enough.
    """
    rewards = beta * torch.where(batch["loss_mask"], logprobs, 0.0).sum(1)
    return compare(rewards, logprobs, batch, lambda margin: _smooth(margin, 0.0))


@LOSSES.register(
    "simpo",
    reads=("chosen",),
    **OF_PAIRS,
    gradient=Gradient("near", "mean margin of pairs", cosine=0.999),
)
def simpo(logprobs: Tensor, batch: TensorDict, *, beta: PositiveFloat, gamma: NonNegativeFloat) -> Unreduced:
    """-ln sigmoid(m - gamma) per pair, m the difference of beta * mean over the tokens of lp.

    SimPO, arXiv 2405.14734, equation 6. Statistics as `dpo`, the reward being beta * mean lp.

    Args:
        beta: the larger, the sooner a pair is right enough.
        gamma: the margin that a pair should have.
    """
    rewards = beta * mean_logprobs(logprobs, batch)
    return compare(rewards, logprobs, batch, lambda margin: _smooth(margin - gamma, 0.0))


@LOSSES.register(
    "orpo",
    reads=("chosen",),
    **OF_PAIRS,
    gradient=Gradient("near", "mean margin of pairs", cosine=0.993),
)
def orpo(logprobs: Tensor, batch: TensorDict, *, weight: PositiveFloat) -> Unreduced:
    """-weight ln sigmoid(ln odds of the chosen - ln odds of the rejected) per pair, odds p / (1 - p), ln p the mean lp.

    ORPO, arXiv 2403.07691, equation 7; the likelihood of the chosen, its other half, is the term `chosen_nll`.
    Statistics as `dpo`, the reward being the log-odds.

    Args:
        weight: lambda of the paper.
    """
    mean = mean_logprobs(logprobs, batch).clamp(max=-torch.finfo(logprobs.dtype).eps)  # a row of probability 1
    odds = mean - (-mean.expm1()).log()
    return compare(odds, logprobs, batch, lambda margin: weight * _smooth(margin, 0.0))


@LOSSES.register("chosen_nll", reads=("chosen",), unit="pair", gradient=Gradient("exact", "mean likelihood of chosen"))
def chosen_nll(logprobs: Tensor, batch: TensorDict) -> Unreduced:
    """-mean over the tokens of the chosen row of lp, per pair: keeps it likely while the rejected row loses likelihood.

    As in ORPO, arXiv 2403.07691, and iterative DPO with NLL, arXiv 2404.19733, equation 1.
    """
    chosen, _, whole = both(mean_logprobs(logprobs, batch), batch)
    return -chosen.where(whole, 0.0), {}


def kto_baseline(logprobs: Tensor, batch: TensorDict, *, all_sum: AllSum) -> dict[str, Tensor]:
    """`kl_baseline` (B,): mean gain of the mismatched rows of all ranks, 0 at least; they are taken out of `loss_mask`.

    Also `label_scale` (B,): rows / rows of the same label. A statistic of one label, times it, has as its mean over all
    rows the mean over the rows of that label.
    """
    keep, mismatched, label = batch["loss_mask"], batch["mismatched"], batch["label"]
    trained = keep.any(1)
    gains = gain(logprobs, batch)
    sides = (trained & mismatched, trained & ~mismatched & label, trained & ~mismatched & ~label)
    counts = torch.stack([side.sum() for side in sides]).double()
    total, others, good, bad = all_sum(torch.cat([gains[sides[0]].double().sum()[None], counts])).unbind()
    scale = (good + bad) / torch.where(label, good, bad).clamp(min=1)
    baseline = (total / others.clamp(min=1)).clamp(min=0)
    return {
        "kl_baseline": baseline.to(gains.dtype).expand(len(batch)).clone(),
        "label_scale": scale.to(gains.dtype),
        "loss_mask": keep & ~mismatched[:, None],
    }


def kto_gradient(beta: float, desirable_weight: float, undesirable_weight: float) -> Gradient:
    """What the gradient of `kto` is with its weights."""
    note = "while the policy equals the reference"
    if desirable_weight == undesirable_weight:
        factor = beta * desirable_weight / 4
        return Gradient("scaled", "likelihood by label", lambda n: factor, note=note)
    return Gradient("near", "likelihood by label", note=note)


@LOSSES.register(
    "kto",
    reads=("ref_logprobs", "label", "mismatched"),
    unit="sequence",
    statistics=EVALUATED,
    prepare=kto_baseline,
    gradient=kto_gradient,
)
def kto(
    logprobs: Tensor,
    batch: TensorDict,
    *,
    beta: PositiveFloat,
    desirable_weight: NonNegativeFloat,
    undesirable_weight: NonNegativeFloat,
) -> Unreduced:
    """w (1 - sigmoid(+-beta (gain - z))) per row, + and w of the good ones, - and w of the bad ones.

    The gain is the sum of a row's log-ratios to the reference, and z, without a gradient, the mean gain of responses
    behind prompts that they do not answer, 0 at least: an estimate of the KL from the reference. KTO, arXiv 2402.01306,
    equation 8.

    Statistics (B,): `preference/accuracy` (1 where the gain is above z and the row good, or below and bad),
    `preference/margin` (+-beta (gain - z)), `preference/reward_chosen`, `preference/reward_rejected`,
    `preference/logprob_chosen`, `preference/logprob_rejected` of the good and of the bad ones as in `dpo`,
    `preference/baseline` (z).

    Args:
        beta: strength of the pull to the reference.
        desirable_weight, undesirable_weight: w of the good and of the bad rows; their sums over rows should be alike.
    """
    label, trained, z = batch["label"], batch["loss_mask"].any(1), batch["kl_baseline"]
    gains = gain(logprobs, batch)
    sign = label.to(gains.dtype) * 2 - 1
    margin = sign * beta * (gains - z)
    weight = torch.where(label, desirable_weight, undesirable_weight)
    sums = torch.where(batch["loss_mask"], logprobs, 0.0).sum(1).detach()
    statistics = {"accuracy": (margin > 0).to(margin.dtype), "margin": margin.detach(), "baseline": z}
    for name, values in (("reward", beta * gains.detach()), ("logprob", sums)):
        for side, rows in (("chosen", label), ("rejected", ~label)):
            statistics[f"{name}_{side}"] = torch.where(rows, values * batch["label_scale"], 0.0)
    loss = weight * torch.sigmoid(-margin)
    return loss.where(trained, 0.0), {f"preference/{k}": value.where(trained, 0.0) for k, value in statistics.items()}


@LOSSES.register(
    "sppo",
    reads=("ref_logprobs", "advantages"),
    unit="sequence",
    gradient=lambda eta: Gradient(
        "scaled",
        factor=lambda n: 2 * eta,
        note="by 2 eta, for advantages that are equal within a row, before the policy has left the reference",
    ),
)
def sppo(logprobs: Tensor, batch: TensorDict, *, eta: PositiveFloat) -> Unreduced:
    """(S - eta A)^2 per row, S the sum of its log-ratios to the reference, A the mean of its advantages.

    SPPO, arXiv 2405.00675, algorithm 1, with the advantage `win_rate`: the policy after an iteration is the reference
    times exp(eta (P - 1/2)), a step of multiplicative weights, but for a normaliser that is taken to be exp(eta / 2).

    Statistics: `kl/ref` (k3), the mean over the row's tokens, (B,).

    Args:
        eta: step size: the target of S is eta / 2 nats for a row that always wins, -eta / 2 for one that always loses.
    """
    keep = batch["loss_mask"]
    target = eta * row_mean(torch.where(keep, batch["advantages"], 0.0), keep)
    difference = log_ratio(logprobs.detach(), batch["ref_logprobs"], keep)
    return (gain(logprobs, batch) - target).square(), {"kl/ref": row_mean(k3(difference), keep)}


def gain(logprobs: Tensor, batch: TensorDict) -> Tensor:
    """The sum of a row's log-ratios to the reference, (B,)."""
    return log_ratio(logprobs, batch["ref_logprobs"], batch["loss_mask"]).sum(1)


def mean_logprobs(logprobs: Tensor, batch: TensorDict) -> Tensor:
    """The mean over a row's trained tokens, (B,)."""
    return torch.where(batch["loss_mask"], logprobs, 0.0).sum(1) / divisor(tokens_of_rows(batch))


def compare(rewards: Tensor, logprobs: Tensor, batch: TensorDict, loss: Callable[[Tensor], Tensor]) -> Unreduced:
    """A loss of the reward of the chosen row minus that of the rejected, per pair, and the statistics of `dpo`."""
    chosen, rejected, whole = both(rewards, batch)
    sums = both(torch.where(batch["loss_mask"], logprobs, 0.0).sum(1).detach(), batch)
    margin = chosen - rejected
    statistics = {
        "preference/accuracy": (margin > 0).to(margin.dtype),
        "preference/margin": margin.detach(),
        "preference/reward_chosen": chosen.detach(),
        "preference/reward_rejected": rejected.detach(),
        "preference/logprob_chosen": sums[0],
        "preference/logprob_rejected": sums[1],
    }
    return loss(margin).where(whole, 0.0), statistics


def _smooth(margin: Tensor, noise: float) -> Tensor:
    return -(1 - noise) * logsigmoid(margin) - noise * logsigmoid(-margin)
