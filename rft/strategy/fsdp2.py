"""FSDP2 on a mesh of one process or many, on gloo or NCCL: one code path."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function
from transformers import PretrainedConfig, PreTrainedModel

from rft.distributed import World
from rft.strategy.base import (
    DTYPES,
    HOST,
    OFFLOADED_ACTIVATIONS,
    OFFLOADED_OPTIMIZER,
    MakeOptimizer,
    Strategy,
    TrainState,
)
from rft.strategy.compiled import compile_function
from rft.strategy.fsdp2_options import FSDP2Options, known_peak
from rft.strategy.gather import WHOLE, GatherOptions, gather, has_sharded_rows


class FSDP2(Strategy):
    """Shards a network over all ranks.

    Args:
        options: checked.
        world: supplied by the run.

    Raises:
        ValueError: names the key where an option does not fit the number of processes.
    """

    Options = FSDP2Options
    options: FSDP2Options
    shards_meta: ClassVar[bool] = True
    memory_labels: ClassVar[Mapping[str, str]] = {
        "FSDP::": "gathered",
        "full_tensor": "gathered",
        OFFLOADED_OPTIMIZER: f"optimizer{HOST}",
        OFFLOADED_ACTIVATIONS: f"activations{HOST}",
    }

    def __init__(self, options: FSDP2Options, world: World) -> None:
        sizes = options.group_sizes()
        if chosen := [name for name, size in sizes.items() if size > 1]:
            options.part(chosen[0], "parallel.groups", "check_groups")(world.size, sizes, options.compile)
        context = None
        if options.context_parallel > 1:
            group = options.part("context_parallel", "parallel.context", "ContextParallel")
            context = group(world, options.context_parallel)
        device_type = "cuda" if options.device == "cuda" else None
        super().__init__(options, world, context, options.attention, device_type, options.compile)
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if self.dtype == torch.float32 else self.dtype,  # None casts no inputs either
            reduce_dtype=DTYPES[options.reduce_dtype],
        )
        self._mesh = self._block_mesh = world.mesh
        self._experts: Any = None  # the `ExpertParallel` of the run, if its experts are split
        if options.replicas > 1:
            shape = (options.replicas, world.size // options.replicas)
            self._mesh = world.new_mesh(shape, ("replicate", "shard"))
            self._block_mesh = self._mesh
        if options.tensor_parallel > 1:
            tensor_parallel = options.part("tensor_parallel", "parallel.tensor", "TensorParallel")
            self.context = group = tensor_parallel(world, options.tensor_parallel, options.replicas)
            self._block_mesh, self._experts = group.data, group.experts
        elif options.expert_parallel > 1:
            group_experts = options.part("expert_parallel", "parallel.experts", "group_experts")
            self._experts = group_experts(world, options.expert_parallel, options.replicas)

    def peak_tflops(self) -> float | None:
        device = self.world.device
        if self.options.peak_tflops is not None or device.type != "cuda":
            return self.options.peak_tflops
        return known_peak(torch.cuda.get_device_name(device), self.dtype)

    def offloads(self, trains: bool) -> bool:
        return self.options.param_offload == "all" or (self.options.param_offload == "frozen" and not trains)

    def check_model(
        self, config: PretrainedConfig, meta_model: Callable[[], PreTrainedModel], packing: bool, key: str
    ) -> None:
        if self.context is not None:
            self.context.check_model(config, packing, key)
            self.context.check_layers(meta_model, key)
        if self.options.expert_parallel > 1:
            self._experts.check_model(meta_model().base_model, key)
        if self.options.fp8 is not None:
            self.options.part("fp8", "fp8", "check_layers")(meta_model().base_model, self.options.fp8, key)

    def parallelize(self, backbone: PreTrainedModel, key: str) -> None:
        if self.context is not None:
            self.context.split_layers(backbone, key)
        if self._experts is not None:
            self._experts.split_all(backbone)

    def shard(self, network: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Shards the blocks one by one, and all other weights with the root; see `Strategy.shard`."""
        device, options = self.world.device, self.options
        trains = any(parameter.requires_grad for parameter in network.parameters())
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if self.offloads(trains) else OffloadPolicy()
        shard = partial(fully_shard, mp_policy=self._policy, offload_policy=offload)
        activations = None
        if options.activation_offload and trains:
            activations = options.part("activation_offload", "offload.activations", "ActivationOffload")(device)
        for block in blocks:
            if options.fp8 is not None:
                options.part("fp8", "fp8", "use_fp8")(block, options.fp8)
            if self.compile:
                block.forward = compile_function(block.forward)
            if (kind := options.activation_checkpointing) != "none":
                options.part("activation_checkpointing", "blocks", "recompute")(block, kind)
            if activations is not None:
                activations.wrap(block)
            self._shard_experts(block, offload)
            shard(block, mesh=self._block_mesh, reshard_after_forward=self.options.reshard_after_forward)
        # None: the weights of the root are needed first in the backward pass, so they stay gathered
        shard(network, mesh=self._mesh, reshard_after_forward=None if self.options.reshard_after_forward else False)
        for module in network.modules() if self.world.size > 1 else ():  # one would divide by 1, in a pass of its own
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _shard_experts(self, block: nn.Module, offload: OffloadPolicy) -> None:
        """Shards the experts that are split, by their rows: their number may be smaller than that of the ranks."""
        for module in block.modules():
            if self._experts is not None and module in self._experts.modules:
                fully_shard(
                    module,
                    mesh=self._experts.data,
                    reshard_after_forward=self.options.reshard_after_forward,
                    shard_placement_fn=lambda parameter: Shard(1),
                    mp_policy=replace(self._policy, cast_forward_inputs=False),  # weights of experts may be float32
                    offload_policy=offload,
                )

    def materialize(self, network: nn.Module) -> None:
        """See `Strategy.materialize`. Parameters stay the same objects, so tied ones stay tied."""
        trains = any(parameter.requires_grad for parameter in network.parameters())
        device = torch.device("cpu") if self.offloads(trains) else self.world.device
        for parameter in network.parameters():
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                torch.utils.swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))

    def begin_training(self, network: nn.Module, make: MakeOptimizer, max_grad_norm: float) -> TrainState:
        state = super().begin_training(network, make, max_grad_norm)
        if self.options.optimizer_offload:
            offload = self.options.part("optimizer_offload", "offload.optimizer", "OptimizerOffload")
            offload(state.optimizer, self.world.device)
        return state

    def backward(self, network: nn.Module, loss: Tensor, last: bool) -> None:
        """Adds the gradient of one micro-batch of an update; see `Strategy.backward`.

        Replicas exchange their sums once an update, or after every micro-batch where `reduce_dtype` is not float32.

        Args:
            last: no other micro-batch of the update follows; gradients are reduced and weights resharded then.
        """
        assert isinstance(network, FSDPModule)
        rounded = self._policy.reduce_dtype != torch.float32
        network.set_requires_gradient_sync(last or self.options.accumulate == "sharded")
        network.set_requires_all_reduce(last or rounded)
        network.set_reshard_after_backward(last or self.options.reshard_after_forward)
        loss.backward()
        if last and self.context is not None:
            self.context.sum_gradients(network.parameters())

    def reshard(self, network: nn.Module) -> None:
        """Frees the blocks that a forward without a backward has left gathered."""
        for module in network.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def full_tensors(
        self, tensors: Iterable[tuple[str, Tensor]], options: GatherOptions = WHOLE
    ) -> Iterator[tuple[str, Tensor]]:
        """See `Strategy.full_tensors`.

        On one rank they share the storage of given tensors that are on the device and not rounded.
        """
        taken = self.world.rank == 0 or not options.rank_zero_only
        for name, tensor in tensors:
            whole: Tensor | None = tensor
            if isinstance(tensor, DTensor) and not (options.sharded and has_sharded_rows(tensor)):
                with record_function("full_tensor"), self.world.wait.during(f"the gather of {name}"):
                    shard = tensor.to(self.world.device, copy=self.options.param_offload == "all")
                    assert isinstance(shard, DTensor)
                    whole = gather(shard, options)
                    del shard
            del tensor
            if taken and whole is not None:
                yield name, whole
            del whole  # before the next one is gathered

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        if self._experts is not None:
            over_meshes: Tensor = self._experts.clip_grad_norm(parameters, max_norm, self.world)
            return over_meshes
        norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(self.world.device)

    def model_state(self, network: nn.Module, with_frozen: bool) -> dict[str, Any]:
        left_out = set() if with_frozen else _frozen(network)
        named = {id(tensor): (name, tensor) for name, tensor in reversed(network.state_dict(keep_vars=True).items())}
        return {name: tensor.detach() for name, tensor in reversed(named.values()) if name not in left_out}

    def load_model_state(self, network: nn.Module, state: dict[str, Any]) -> None:
        targets = self.model_state(network, with_frozen=True)
        missing = targets.keys() - state.keys() - _frozen(network)
        assert not missing, f"the state lacks {sorted(missing)}"
        with torch.no_grad():
            for name, tensor in state.items():
                targets[name].copy_(tensor)

    def optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        state = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
        groups = [
            {**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        own_groups = self.optimizer_state(network, optimizer)["param_groups"]
        order = [
            name for group in own_groups for name in group["params"]
        ]  # the optimizer counts its parameters in this order
        numbers = {name: number for number, name in enumerate(order)}
        groups = [
            {**saved, "params": [numbers[name] for name in group["params"]]}
            for saved, group in zip(state["param_groups"], own_groups, strict=True)
        ]
        by_number = {numbers[name]: values for name, values in state["state"].items()}
        optimizer.load_state_dict({"state": by_number, "param_groups": groups})


def _frozen(network: nn.Module) -> set[str]:
    return {name for name, p in network.named_parameters(remove_duplicate=False) if not p.requires_grad}
