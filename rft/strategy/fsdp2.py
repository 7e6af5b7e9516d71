"""FSDP2 on a mesh of one process or many, on gloo or NCCL: one code path."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rft.distributed import World

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class FSDP2:
    """Spreads a network over all ranks.

    Args:
        world: supplied by the run.
        device: where to compute (read before this object is made, when the processes start).
        dtype: what forward and backward compute in; master weights and gradient reductions are float32.
        reshard_after_forward: frees gathered blocks between forward and backward (memory), or keeps them (speed).
    """

    def __init__(
        self,
        world: World,
        device: Literal["auto", "cpu", "cuda"],
        dtype: Literal["float32", "bfloat16"],
        reshard_after_forward: bool,
    ) -> None:
        self.world = world
        self._reshard = reshard_after_forward
        self._policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if dtype == "bfloat16" else None, reduce_dtype=torch.float32
        )

    def shard(self, network: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Shards the blocks one by one and what is left with the root. Gradients are summed over ranks, not averaged:
        losses are divided by global counts already."""
        network.to(self.world.device)
        for module in (*blocks, network):
            fully_shard(module, mesh=self.world.mesh, reshard_after_forward=self._reshard, mp_policy=self._policy)
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def reshard(self, network: nn.Module) -> None:
        """Frees the blocks that a forward without a backward has left gathered: its parameters are the shards again."""
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full_tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Names and whole weights, one at a time. A collective. On one rank they share the module's storage."""
        for name, parameter in module.state_dict(keep_vars=False).items():
            if isinstance(parameter, DTensor):
                parameter = parameter.to_local() if self.world.size == 1 else parameter.full_tensor()
            yield name, parameter

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clips the global gradient norm and returns what it was. A collective."""
        norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def model_state(self, network: nn.Module) -> dict[str, Any]:
        """The whole state on the CPU of rank zero (other ranks get an empty dict). A collective."""
        return get_model_state_dict(network, options=FULL)

    def load_model_state(self, network: nn.Module, state: dict[str, Any]) -> None:
        """Loads a whole state that every rank has read."""
        set_model_state_dict(network, state, options=StateDictOptions(full_state_dict=True))

    def optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole optimizer state on the CPU of rank zero. A collective."""
        return get_optimizer_state_dict(network, optimizer, options=FULL)

    def load_optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads a whole optimizer state that every rank has read."""
        set_optimizer_state_dict(network, optimizer, state, options=StateDictOptions(full_state_dict=True))
