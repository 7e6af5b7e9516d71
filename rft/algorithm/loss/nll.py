"""The loss of supervised training."""

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm.gradient import Gradient
from rft.algorithm.registries import LOSSES, Unreduced


@LOSSES.register("nll", gradient=Gradient("exact", target="likelihood"))
def nll(logprobs: Tensor, batch: TensorDict) -> Unreduced:
    """-log p of every trained token (B, T)."""
    return torch.where(batch["loss_mask"], -logprobs, 0.0), {}
