"""Muon: momentum whose matrix is made orthogonal before it moves the weights (Jordan 2024; at scale 2502.16982).

The update of a matrix has the size that AdamW's would have, so AdamW's learning rate and weight decay are kept.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ADAMW_RMS = 0.2  # of the numbers of an update of AdamW, in units of the learning rate (2502.16982, 2.2)


def takes(parameter: nn.Parameter) -> bool:
    """True for a matrix (A, B) and for a stack of them (experts, A, B)."""
    return parameter.dim() in (2, 3) and min(parameter.shape[-2:]) > 1


def step(parameters: Iterable[nn.Parameter], states: Iterable[dict[str, Any]], group: dict[str, Any]) -> None:
    """One update of parameters that have a gradient. State: `momentum_buffer`. A collective where they are sharded."""
    alike: dict[torch.Size, list[tuple[nn.Parameter, Tensor, Tensor]]] = {}
    for parameter, state in zip(parameters, states, strict=True):
        assert parameter.grad is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - MOMENTUM)
        alike.setdefault(parameter.shape, []).append((parameter, parameter.grad, momentum))
    for shape, moved in alike.items():
        size = group["lr"] * ADAMW_RMS * math.sqrt(max(shape[-2:]))
        at_once = holders(moved[0][0])
        for first in range(0, len(moved), at_once):
            some = moved[first : first + at_once]
            updates = orthogonal([grad.lerp(momentum, MOMENTUM) for _, grad, momentum in some])  # Nesterov's
            for (parameter, *_), update in zip(some, updates, strict=True):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-size)


def holders(parameter: Tensor) -> int:
    """Over how many ranks a parameter is sharded."""
    if not isinstance(parameter, DTensor):
        return 1
    places = enumerate(parameter.placements)
    return math.prod(parameter.device_mesh.size(number) for number, place in places if place.is_shard())


def orthogonal(updates: list[Tensor]) -> list[Tensor]:
    """The nearest orthogonal matrices of updates of one shape, at most one for each rank that holds a part of them.

    Sharded rows become whole matrices, one on each rank, and rows again. Experts are whole on their rank already.
    """
    stack = torch.stack(updates)  # (n, A, B) or (n, experts, A, B)
    if not isinstance(stack, DTensor):
        return list(newton_schulz(stack))
    rows = stack.placements
    if stack.dim() == 3:
        stack = stack.redistribute(placements=[Shard(0) if place.is_shard() else place for place in rows])
    done = DTensor.from_local(
        newton_schulz(stack.to_local()), stack.device_mesh, stack.placements, shape=stack.shape, stride=stack.stride()
    )
    return list(done.redistribute(placements=rows).unbind())


def newton_schulz(matrices: Tensor) -> Tensor:
    """U V^T of matrices U S V^T (..., A, B), roughly and in bfloat16: singular values end between 0.7 and 1.2."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if wide else matrices.mT).bfloat16().flatten(0, -3)  # (n, A, B)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.mT).reshape(matrices.shape)
