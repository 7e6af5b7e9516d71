"""Advantages against the solve rate of a prompt in earlier steps: they need no second answer to it."""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.advantage.whiten import whitened
from rft.algorithm.gradient import Gradient
from rft.algorithm.registries import ADVANTAGES, AllSum


@ADVANTAGES.register(
    "spo",
    reads=("baseline_scores",),
    gradient=Gradient("near", cosine=0.997, note="rows are in the mean that whitening subtracts"),
)
def spo(scores: Tensor, rewards: Tensor, batch: TensorDict, *, all_sum: AllSum) -> dict[str, Tensor]:
    """R - p, whitened over the rows of all ranks that have a trained token. SPO, arXiv 2509.13232, section 3.

    p is `baseline_scores` (B,): the solve rate of the prompt as the source knew it before these answers. It does
    not depend on them, so it does not bias the gradient, even if R has another scale.
    """
    trained = batch["loss_mask"].any(-1)  # (B,)
    advantage = whitened(scores.double() - batch["baseline_scores"].double(), trained, all_sum)
    return {"advantages": torch.where(batch["loss_mask"], advantage.to(scores.dtype)[:, None], 0.0)}  # (B, T)
