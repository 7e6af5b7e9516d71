"""Losses of games that a policy plays against what it was when the iteration began, which is the reference."""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.gradient import Gradient
from rft.algorithm.kl import k3
from rft.algorithm.loss.preference import gain
from rft.algorithm.loss.sequence import row_mean
from rft.algorithm.ratio import log_ratio
from rft.algorithm.registries import LOSSES, Unreduced
from rft.registry import in_range


@LOSSES.register(
    "sppo",
    fault=in_range("eta", low=0, open=True),
    reads=("ref_logprobs", "advantages"),
    unit="sequence",
    gradient=lambda options: Gradient(
        "scaled",
        factor=lambda n: 2 * options["eta"],
        note="by 2 eta, for advantages that are equal within a row, while the policy equals the reference",
    ),
)
def sppo(logprobs: Tensor, batch: TensorDict, *, eta: float) -> Unreduced:
    """(S - eta A)^2 per row, S the sum of its log-ratios to the reference, A the mean of its advantages.

    SPPO, arXiv 2405.00675, algorithm 1, with the advantage `win_rate`: the policy after an iteration is the reference
    times exp(eta (P - 1/2)), a step of multiplicative weights, but for a normaliser that is taken to be exp(eta / 2).

    Statistics: `kl/ref` (k3), the mean over the row's tokens, (B,).

    Args:
        eta: step of the game: a row that always wins is to gain eta / 2 nats, one that always loses to lose as many.
    """
    keep = batch["loss_mask"]
    target = eta * row_mean(torch.where(keep, batch["advantages"], 0.0), keep)
    difference = log_ratio(logprobs.detach(), batch["ref_logprobs"], keep)
    return (gain(logprobs, batch) - target).square(), {"kl/ref": row_mean(k3(difference), keep)}
