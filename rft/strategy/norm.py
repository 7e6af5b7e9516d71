"""The norm of a gradient whose tensors are spread over the ranks in different ways."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rft.distributed import World


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, world: World) -> Tensor:
    """Clips the global gradient norm and returns what it was; see `Strategy.clip_grad_norm`.

    `torch.nn.utils.clip_grad_norm_` needs all tensors on one mesh. Here what several ranks hold counts once.
    """
    gradients = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(copies(gradient, world.size), []).append(gradient.to_local())
    squares = [nn.utils.get_total_norm(local).square() / count for count, local in by_copies.items()]
    square = torch.stack([each.to(world.device) for each in squares]).sum()
    torch.distributed.all_reduce(square)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local()
        local.mul_(factor.to(local.device))
    return norm


def copies(tensor: Tensor, ranks: int) -> int:
    """How many of all ranks hold the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return ranks
    mesh = tensor.device_mesh
    replicas = math.prod(mesh.size(dim) for dim, placed in enumerate(tensor.placements) if placed.is_replicate())
    return replicas * ranks // mesh.size()
