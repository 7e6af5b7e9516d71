"""Expert parallelism (2006.16668): each rank of a group holds some experts of every layer, and ranks exchange tokens.

A rank sends a token to the ranks of the experts that its router has chosen, and they return what the experts computed.
"""

import copy
import re
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from rft.distributed import World
from rft.strategy.parallel.context import all_to_all
from rft.strategy.parallel.groups import clip_grad_norm, group_meshes


class ExpertParallel:
    """The ranks that share the experts of a model.

    Args:
        mesh: one-dimensional, over the ranks of the group of this rank.
        data: over the ranks of all groups that hold the same experts, which are sharded over its last dimension.

    Attributes:
        modules: that are split; each holds the experts of a layer.
    """

    clip_grad_norm = staticmethod(clip_grad_norm)

    def __init__(self, mesh: DeviceMesh, data: DeviceMesh) -> None:
        self.data = data
        self.modules = WeakSet[nn.Module]()
        self._mesh, self._group, self._size = mesh, mesh.get_group(), mesh.size()

    def check_model(self, backbone: PreTrainedModel, where: str) -> None:
        """Checks that the experts of a model can be split. The actor must have some; other models may be dense.

        Args:
            where: the model's place in the yaml.

        Raises:
            ValueError: names the key.
        """
        key = "strategy.expert_parallel"
        if where == "actor" and not find_experts(backbone):
            raise ValueError(
                f"{key}={self._size}: transformers has no plan for experts of {type(backbone).__name__} of {where}; "
                f"set {key}=1, or train a mixture of experts such as qwen3_moe"
            )
        check_experts(backbone, self._size, self.data.size(self.data.ndim - 1), key, where)

    def split_all(self, backbone: PreTrainedModel) -> None:
        """Splits the experts of all layers of a model; see `split`."""
        for experts in find_experts(backbone).values():
            self.split(experts)

    def split(self, experts: nn.Module) -> None:
        """Splits the experts of a layer in place; the names of the parameters stay.

        Args:
            experts: its parameters are stacked experts, (experts, ...). It is called with hidden states (n, D), the
                experts of each token (n, k) and their weights (n, k), and returns the weighted sums (n, D).
        """
        memo: dict[int, Any] = {id(vars(experts)["config"]): vars(experts)["config"]}
        memo |= {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in experts.parameters()}
        local = copy.deepcopy(experts, memo)  # without weights
        total = int(vars(experts)["num_experts"])
        vars(local)["num_experts"] = total // self._size
        for name, parameter in list(experts.named_parameters()):
            part = distribute_tensor(parameter.detach(), self._mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        vars(experts)["forward"] = partial(self._exchange, experts, local)
        self.modules.add(experts)

    def _exchange(
        self, experts: nn.Module, local: nn.Module, states: Tensor, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        """The forward of split experts.

        Args:
            local: computes with the experts of this rank.
        """
        per_rank = int(vars(local)["num_experts"])
        order = chosen.flatten().argsort(stable=True)  # (n k,) by expert
        counts = torch.bincount(chosen.flatten(), minlength=per_rank * self._size)  # (experts,)
        arriving = torch.empty_like(counts)  # (ranks * per_rank,)
        dist.all_to_all_single(arriving, counts, group=self._group)
        sent, received = (each.view(self._size, per_rank).sum(1).tolist() for each in (counts, arriving))
        rows = all_to_all(states[order // chosen.shape[1]], sent, received, self._group)  # (m, D)
        numbers = torch.arange(per_rank, device=rows.device).repeat(self._size).repeat_interleave(arriving)  # (m,)
        parts = {name: part.to_local() for name, part in experts.named_parameters() if isinstance(part, DTensor)}
        results = functional_call(local, parts, (rows, numbers[:, None], rows.new_ones(len(rows), 1)))
        returned = all_to_all(results, received, sent, self._group)[order.argsort()]  # (n k, D)
        weighted = returned.view(*chosen.shape, -1) * weights[..., None]
        return weighted.sum(1).to(states.dtype)


def group_experts(world: World, size: int, replicas: int) -> ExpertParallel:
    """The ranks that share the experts of a model, `size` of them in a group; see `group_meshes`. A collective."""
    return ExpertParallel(*group_meshes(world, size, replicas))


def find_experts(backbone: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that hold the experts of a layer, by name: those whose tokens transformers knows how to exchange."""
    plan = backbone.config.get_text_config().base_model_ep_plan or {}
    return {name: part for name, part in backbone.named_modules() if plan.get(in_plan(name)) == "ep_dispatch_experts"}


def in_plan(name: str) -> str:
    """The name of a module as plans of transformers have it: `layers.*.mlp` for `layers.3.mlp`."""
    return re.sub(r"\d+", "*", name)


def check_experts(backbone: PreTrainedModel, size: int, shards: int, key: str, where: str) -> None:
    """Checks that experts divide over `size` ranks, and the rows of each of them over `shards` ranks.

    Args:
        key: that sets the size.
        where: the model's place in the yaml.

    Raises:
        ValueError: names the key.
    """
    for name, module in find_experts(backbone).items():
        for parameter in module.parameters():
            parts = (parameter.shape[0], size, "experts"), (parameter.shape[1], shards, "rows of experts")
            for count, ranks, what in parts:
                if count % ranks:
                    raise ValueError(
                        f"{key}={size}: the {count} {what} of {name} of {where} do not divide over {ranks} ranks; "
                        f"choose another {key}"
                    )
