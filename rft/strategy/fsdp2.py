"""FSDP2 on a mesh of one process or many, on gloo or NCCL: one code path."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rft.distributed import World
from rft.strategy.blocks import recompute
from rft.strategy.context import Context
from rft.strategy.loss_scale import LossScale
from rft.strategy.tensor import TensorParallel

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class FSDP2:
    """Spreads a network over all ranks.

    Args:
        world: supplied by the run.
        device: where to compute (read before this object is made, when the processes start).
        dtype: what forward and backward compute in; master weights are float32.
        reduce_dtype: what gradients are summed over ranks in.
        reshard_after_forward: frees gathered blocks between forward and backward (memory), or keeps them from the first
            forward of an update to its last backward (speed).
        accumulate: between the micro-batches of an update the gradient is `sharded`, and reduced each time, or `whole`,
            and reduced once.
        replicas: the weights are sharded over world size / replicas ranks, and so many such groups hold them (HSDP).
        context_parallel: so many ranks compute each sequence together, a slice of its tokens each.
        tensor_parallel: so many ranks do so with a part of each weight matrix of the blocks; what is left is sharded.
        activation_checkpointing: which activations of the blocks are computed again in the backward pass.
        compile: compiles the blocks, once for all of them and all lengths.

    Raises:
        ValueError: names the key where an option does not fit the number of processes or another option.
    """

    def __init__(
        self,
        world: World,
        device: Literal["auto", "cpu", "cuda"],
        dtype: Literal["float32", "bfloat16", "float16"],
        reduce_dtype: Literal["float32", "bfloat16"],
        reshard_after_forward: bool,
        accumulate: Literal["sharded", "whole"],
        replicas: int,
        context_parallel: int,
        tensor_parallel: int,
        activation_checkpointing: Literal["none", "full", "selective"],
        compile: bool,
    ) -> None:
        groups = {"replicas": replicas, "context_parallel": context_parallel, "tensor_parallel": tensor_parallel}
        for key, ranks in groups.items():
            if ranks < 1 or world.size % ranks:
                raise ValueError(
                    f"strategy.{key}={ranks} does not divide the {world.size} processes; choose a divisor of them, or 1"
                )
        if tensor_parallel > 1:
            others = {"replicas": replicas > 1, "context_parallel": context_parallel > 1, "compile": compile}
            if both := [f"strategy.{key}" for key, on in others.items() if on]:
                raise ValueError(
                    f"strategy.tensor_parallel={tensor_parallel} does not go with {', '.join(both)}; leave "
                    f"{' and '.join(both)} at the default, or set strategy.tensor_parallel=1"
                )
        if accumulate == "whole" and reduce_dtype != "float32":
            raise ValueError(
                f"strategy.accumulate=whole adds up micro-batches in strategy.reduce_dtype={reduce_dtype}, which loses "
                "small gradients; set strategy.reduce_dtype=float32 or strategy.accumulate=sharded"
            )
        if compile and activation_checkpointing == "selective":
            raise ValueError(
                "strategy.activation_checkpointing=selective cannot see the operations of compiled blocks, which by "
                "themselves compute again what is fast; set strategy.activation_checkpointing=none or full, or "
                "strategy.compile=false"
            )
        self.world = world
        self.dtype = DTYPES[dtype]
        self._reshard = reshard_after_forward
        self._accumulate = accumulate
        self._checkpointing = activation_checkpointing
        self._compile = compile
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if dtype == "float32" else DTYPES[dtype],  # None casts no inputs either
            reduce_dtype=DTYPES[reduce_dtype],
        )
        self.context = Context(world, context_parallel) if context_parallel > 1 else None
        self._mesh = self._block_mesh = world.mesh
        if tensor_parallel > 1:
            self.context = TensorParallel(world, tensor_parallel)
            self._block_mesh = self.context.data
        if replicas > 1:
            shape = (replicas, world.size // replicas)
            self._mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))
            self._block_mesh = self._mesh

    def shard(self, network: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Shards the blocks one by one and what is left with the root. Gradients are summed over ranks, not averaged:
        losses are divided by global counts already."""
        network.to(self.world.device)
        for block in blocks:
            if self._compile:
                block.forward = torch.compile(block.forward, dynamic=True)
            if self._checkpointing != "none":
                recompute(block, self._checkpointing)
            fully_shard(block, mesh=self._block_mesh, reshard_after_forward=self._reshard, mp_policy=self._policy)
        # None: what the root holds is needed first in the backward pass, so it stays gathered
        fully_shard(
            network, mesh=self._mesh, reshard_after_forward=None if self._reshard else False, mp_policy=self._policy
        )
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def loss_scale(self) -> LossScale:
        """What a loss is multiplied by before its backward."""
        moves = self.dtype == torch.float16
        return LossScale(factor=2.0**16 if moves else 1.0, moves=moves)

    def backward(self, network: nn.Module, loss: Tensor, last: bool) -> None:
        """Adds the gradient of one micro-batch of an update.

        Over replicas sums are exchanged once an update, unless they would add up in less than float32.

        Args:
            last: no other micro-batch of the update follows; gradients are reduced and weights are shards then.
        """
        assert isinstance(network, FSDPModule)
        rounded = self._policy.reduce_dtype != torch.float32
        network.set_requires_gradient_sync(last or self._accumulate == "sharded")
        network.set_requires_all_reduce(last or rounded)
        network.set_reshard_after_backward(last or self._reshard)
        loss.backward()
        if last and isinstance(self.context, TensorParallel):
            self.context.sum_gradients(network.parameters())

    def reshard(self, network: nn.Module) -> None:
        """Frees the blocks that a forward without a backward has left gathered: its parameters are the shards again."""
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Names and whole weights, one at a time. A collective. On one rank they share the storage of what is given."""
        for name, tensor in tensors:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local() if self.world.size == 1 else tensor.full_tensor()
            yield name, tensor

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clips the global gradient norm and returns what it was. A collective."""
        if isinstance(self.context, TensorParallel):
            return self.context.clip_grad_norm(parameters, max_norm)
        norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def model_state(self, network: nn.Module, with_frozen: bool) -> dict[str, Any]:
        """A copy of the whole state, or of what trains, on the CPU of rank zero (others get none). A collective."""
        options = replace(FULL, ignore_frozen_params=not with_frozen)
        state: dict[str, Any] = get_model_state_dict(network, options=options)
        left_out = set() if with_frozen else _frozen(network)  # the option knows one name of a tied weight
        return {name: state.pop(name).clone() for name in list(state) if name not in left_out}

    def load_model_state(self, network: nn.Module, state: dict[str, Any]) -> None:
        """Loads a state that every rank has read; frozen weights that it does not hold stay as they are."""
        missing = network.state_dict().keys() - state.keys() - _frozen(network)
        assert not missing, f"the state lacks {sorted(missing)}"
        set_model_state_dict(network, dict(state), options=StateDictOptions(full_state_dict=True, strict=False))

    def optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole optimizer state on the CPU of rank zero. A collective."""
        return get_optimizer_state_dict(network, optimizer, options=FULL)

    def load_optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Loads a whole optimizer state that every rank has read."""
        set_optimizer_state_dict(network, optimizer, state, options=StateDictOptions(full_state_dict=True))


def _frozen(network: nn.Module) -> set[str]:
    return {name for name, p in network.named_parameters(remove_duplicate=False) if not p.requires_grad}
