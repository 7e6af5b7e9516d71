"""Losses of reward models: a score of a response learnt from pairs, a score of a step learnt from its label, and an
implicit reward of a token, which is the log-ratio of a language model to the reference.

The value of a pair stands in both of its rows, and so do its statistics: their mean over rows is that over pairs.
"""

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, softplus

from rft.algorithm import LOSSES, Gradient, Unreduced
from rft.algorithm.divergence import log_ratio
from rft.algorithm.scores.groups import both
from rft.ranges import PositiveFloat


@LOSSES.register(
    "bradley_terry",
    head="score",
    outputs=("score",),
    unit="pair",
    reads=lambda margin: ("chosen", "margin") if margin else ("chosen",),
    statistics=("preference/accuracy", "preference/margin"),
    gradient=Gradient("exact", target="likelihood of the preference by score"),
)
def bradley_terry(score: Tensor, batch: TensorDict, *, margin: bool) -> Unreduced:
    """-ln sigmoid(s_chosen - s_rejected - m) per pair, s the score of a row.

    Bradley-Terry as in InstructGPT, arXiv 2203.02155, equation 1, with the margin m of Llama 2, arXiv 2307.09288,
    equation 2.

    Statistics (B,): `preference/accuracy` (1 where the chosen row scores higher), `preference/margin` (by how much),
    `preference/score_chosen`, `preference/score_rejected`.

    Args:
        margin: m is the column `margin`; otherwise it is 0.
    """
    chosen, rejected, whole = both(row_scores(score, batch), batch)
    gap = chosen - rejected
    loss = softplus(batch["margin"] - gap if margin else -gap)
    statistics = {
        "preference/accuracy": (gap > 0).to(gap.dtype),
        "preference/margin": gap.detach(),
        "preference/score_chosen": chosen.detach(),
        "preference/score_rejected": rejected.detach(),
    }
    return loss.where(whole, 0.0), statistics


@LOSSES.register(
    "score_centering",
    head="score",
    outputs=("score",),
    unit="pair",
    reads=("chosen",),
    gradient=Gradient("exact", target="scores around zero"),
)
def score_centering(score: Tensor, batch: TensorDict) -> Unreduced:
    """(s_chosen + s_rejected)^2 per pair: fixes the constant that preferences leave undetermined.

    arXiv 2312.09244, equation 2.
    """
    chosen, rejected, _ = both(row_scores(score, batch), batch)
    return (chosen + rejected).square(), {}


@LOSSES.register(
    "step_cross_entropy",
    head="step",
    outputs=("score",),
    reads=("step_labels",),
    statistics=("steps/accuracy",),
    gradient=Gradient("exact", target="likelihood of the labels"),
)
def step_cross_entropy(score: Tensor, batch: TensorDict) -> Unreduced:
    """-y ln p - (1 - y) ln(1 - p) per step (B, T), p = sigmoid(score) at the step's last token, y its label.

    As for PRM800K, arXiv 2305.20050, section 2.6, and Math-Shepherd, arXiv 2312.08935, equation 2; y may be soft.

    Statistics (B, T): `steps/accuracy` (1 where p and y are on the same side of a half), `steps/probability` (p),
    `steps/label` (y).
    """
    keep = batch["loss_mask"]
    score = torch.where(keep, score, 0.0)
    label = torch.where(keep, batch["step_labels"], 0.0)
    loss = softplus(score) - label * score
    statistics = {
        "steps/accuracy": ((score > 0) == (label > 0.5)).to(score.dtype),
        "steps/probability": score.detach().sigmoid(),
        "steps/label": label,
    }
    return loss.where(keep, 0.0), {name: values.where(keep, 0.0) for name, values in statistics.items()}


@LOSSES.register(
    "implicit_reward",
    reads=("ref_logprobs", "terms"),
    unit="sequence",
    gradient=Gradient("exact", target="likelihood of the outcome"),
)
def implicit_reward(logprobs: Tensor, batch: TensorDict, *, beta: PositiveFloat, term: str) -> Unreduced:
    """Cross-entropy of sigmoid(beta * sum_t (lp - lp_ref)) against the outcome of the row, (B,).

    PRIME, arXiv 2502.01456, equation 4.

    Statistics (B,): `prm/accuracy`, 1 where the sign of the sum matches the outcome.

    Args:
        beta: scale of the process reward.
        term: the raw reward term that is the outcome, between 0 and 1.
    """
    logits = beta * log_ratio(logprobs, batch["ref_logprobs"], batch["loss_mask"]).sum(1)  # (B,)
    outcome = batch["terms", term].to(logits.dtype)
    loss = binary_cross_entropy_with_logits(logits, outcome, reduction="none")
    trained = batch["loss_mask"].any(1)
    right = ((logits > 0) == (outcome > 0.5)).to(logits.dtype)
    return loss.where(trained, 0.0), {"prm/accuracy": right.where(trained, 0.0)}


def row_scores(score: Tensor, batch: TensorDict) -> Tensor:
    """The score of each row (B,), from the column (B, T) that has it at the row's last trained token."""
    return torch.where(batch["loss_mask"], score, 0.0).sum(1)
