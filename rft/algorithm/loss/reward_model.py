"""Losses of reward models: one score a row, learnt from which of two responses is the better one.

The value of a pair stands in both of its rows, and so do its statistics: their mean over rows is that over pairs.
"""

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import softplus

from rft.algorithm.gradient import Gradient
from rft.algorithm.pairs import both
from rft.algorithm.registries import LOSSES, Unreduced


def _reads(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("chosen", "margin") if options["margin"] else ("chosen",)


@LOSSES.register(
    "bradley_terry",
    head="score",
    outputs=("score",),
    unit="pair",
    reads=_reads,
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


def row_scores(score: Tensor, batch: TensorDict) -> Tensor:
    """The score of each row (B,), from the column (B, T) that has it at the row's last trained token."""
    return torch.where(batch["loss_mask"], score, 0.0).sum(1)
