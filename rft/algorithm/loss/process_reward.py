"""The loss of a process reward model: a score for every step of an answer, learnt from a label for each."""

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import softplus

from rft.algorithm.gradient import Gradient
from rft.algorithm.registries import LOSSES, Unreduced


@LOSSES.register(
    "step_cross_entropy",
    head="step",
    outputs=("score",),
    reads=("step_labels",),
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
