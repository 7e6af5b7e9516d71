"""Muon: the momentum of a matrix is orthogonalized before the update (Jordan 2024; at scale: arXiv 2502.16982).

Updates are scaled to the RMS of AdamW's updates, so that AdamW's learning rate and weight decay can be reused.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rft.actor.optim.optimizer import Rule
from rft.strategy.gather import shard_count

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ADAMW_RMS = 0.2  # RMS of an update of AdamW, in units of the learning rate (arXiv 2502.16982, section 2.2)


def takes(parameter: nn.Parameter) -> bool:
    """True if Muon updates a parameter: a matrix (A, B) or a stack of matrices (experts, A, B)."""
    return parameter.dim() in (2, 3) and min(parameter.shape[-2:]) > 1


def step(parameters: Iterable[nn.Parameter], states: Iterable[dict[str, Any]], group: dict[str, Any]) -> None:
    """Updates parameters that have a gradient. State: `momentum_buffer`. A collective if they are sharded."""
    by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor, Tensor]]] = {}
    for parameter, state in zip(parameters, states, strict=True):
        assert parameter.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - MOMENTUM)
        by_shape.setdefault(parameter.shape, []).append((parameter, parameter.grad, momentum))
    for shape, entries in by_shape.items():
        size = group["lr"] * ADAMW_RMS * math.sqrt(max(shape[-2:]))
        count = shard_count(entries[0][0])
        for first in range(0, len(entries), count):
            chunk = entries[first : first + count]
            updates = orthogonal([grad.lerp(momentum, MOMENTUM) for _, grad, momentum in chunk])  # Nesterov momentum
            for (parameter, *_), update in zip(chunk, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-size)


RULE = Rule(takes, step, of_blocks=True)


def orthogonal(updates: list[Tensor]) -> list[Tensor]:
    """Orthogonalizes updates of equal shape; sharded ones are at most as many as the ranks that shard them.

    Sharded matrices are redistributed so that each rank has one full matrix, and then back to sharded rows. A stack of
    experts is sharded by expert, so that each rank already has full matrices.
    """
    stack = torch.stack(updates)  # (n, A, B) or (n, experts, A, B)
    if not isinstance(stack, DTensor):
        return list(newton_schulz(stack))
    placements = stack.placements
    if stack.dim() == 3:
        stack = stack.redistribute(placements=[Shard(0) if each.is_shard() else each for each in placements])
    result = DTensor.from_local(
        newton_schulz(stack.to_local()), stack.device_mesh, stack.placements, shape=stack.shape, stride=stack.stride()
    )
    return list(result.redistribute(placements=placements).unbind())


def newton_schulz(matrices: Tensor) -> Tensor:
    """Approximates U V^T of matrices U S V^T (..., A, B) in bfloat16: singular values end between 0.7 and 1.2."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if wide else matrices.mT).bfloat16().flatten(0, -3)  # (n, A, B)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).reshape(matrices.shape)
