"""The groups of ranks that share a model: which numbers of ranks go together, their meshes, and the norm of a gradient
whose tensors are spread over them in different ways.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rft.distributed import World
from rft.strategy.base import ModelFacts
from rft.strategy.gather import shard_count

SPLITS = ("tensor_parallel", "expert_parallel")  # options that split matrices or experts
EXCLUDED = (
    ("tensor_parallel", "context_parallel"),
    ("tensor_parallel", "expert_parallel"),
    ("tensor_parallel", "compile"),
    ("expert_parallel", "compile"),
)


def check_groups(processes: int, sizes: Mapping[str, int], compile: bool) -> None:
    """Checks the numbers of ranks of groups against the number of processes and against each other.

    Args:
        sizes: by the keys of `strategy`.

    Raises:
        ValueError: names the keys.
    """
    for key, ranks in sizes.items():
        if processes % ranks:
            raise ValueError(
                f"strategy.{key}={ranks} does not divide the {processes} processes; choose a divisor of them, or 1"
            )
    chosen = {key for key, ranks in sizes.items() if ranks > 1} | ({"compile"} if compile else set())
    for key in (key for key in SPLITS if key in chosen):
        if both := [f"strategy.{name}" for split, name in EXCLUDED if split == key and name in chosen]:
            raise ValueError(
                f"strategy.{key}={sizes[key]} does not go with {', '.join(both)}; leave {' and '.join(both)} at the "
                f"default, or set strategy.{key}=1"
            )
        if processes % (sizes["replicas"] * sizes[key]):
            raise ValueError(
                f"strategy.replicas={sizes['replicas']} times strategy.{key}={sizes[key]} does not divide the "
                f"{processes} processes; make one of them smaller"
            )


def split_errors(sizes: Mapping[str, int], models: Mapping[str, ModelFacts]) -> list[str]:
    """Why weights of the models cannot be split.

    Args:
        sizes: ranks of a group, by the keys of `SPLITS`.
        models: by their yaml keys.
    """
    errors = []
    for split, undo in ((f"strategy.{key}={sizes[key]}", f"strategy.{key}=1") for key in SPLITS if sizes[key] > 1):
        errors += [
            f"{key}.optimizer.name=muon: it needs whole matrices, and {split} splits them; set "
            f"{key}.optimizer.name=adamw, or {undo}"
            for facts in models.values()
            for key, optimizer in facts.optimizers.items()
            if optimizer == "muon"
        ]
    if sizes["tensor_parallel"] > 1:
        errors += [
            f"{key}.lora.quantize: packed weights cannot be split over the ranks of strategy.tensor_parallel="
            f"{sizes['tensor_parallel']}; set {key}.lora.quantize=null, or strategy.tensor_parallel=1"
            for key, facts in models.items()
            if facts.quantized
        ]
    return errors


def group_meshes(world: World, size: int, replicas: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh over the ranks of a group, and that over the ranks of all groups that hold the same part of a model.

    The second one shards this part over its last dimension; it has two dimensions if there are replicas.

    Args:
        size: consecutive ranks that are a group.
        replicas: number of groups of ranks that each hold all the weights.
    """
    shape = (replicas, world.size // (replicas * size), size)
    mesh = world.new_mesh(shape, ("replicate", "shard", "group"))
    return mesh["group"], mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, world: World) -> Tensor:
    """Clips the global gradient norm and returns what it was; see `Strategy.clip_grad_norm`.

    `torch.nn.utils.clip_grad_norm_` needs all tensors on one mesh. Here what several ranks hold counts once.
    """
    gradients = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(world.size // shard_count(gradient), []).append(gradient.to_local())
    squares = [nn.utils.get_total_norm(local).square() / count for count, local in by_copies.items()]
    square = torch.stack([each.to(world.device) for each in squares]).sum()
    torch.distributed.all_reduce(square)
    norm = square.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local()
        local.mul_(factor.to(local.device))
    return norm
