"""FSDP2 on a mesh of one process or many, on gloo or NCCL: one code path."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function
from transformers import PretrainedConfig, PreTrainedModel

from rft.distributed import World
from rft.errors import Checks
from rft.ranges import PositiveFloat, PositiveInt
from rft.strategy.attention import Attention, check_attention
from rft.strategy.base import AUTO, DTYPES, HOST, MakeOptimizer, ModelFacts, Strategy, TrainState, chosen_dtype
from rft.strategy.blocks import recompute
from rft.strategy.compiled import compile_function
from rft.strategy.fp8 import Fp8, check_layers, use_fp8
from rft.strategy.gather import WHOLE, GatherOptions, gather, has_sharded_rows
from rft.strategy.model_errors import model_errors
from rft.strategy.norm import clip_grad_norm
from rft.strategy.offload.activations import LABEL as ACTIVATIONS
from rft.strategy.offload.activations import ActivationOffload
from rft.strategy.offload.optimizer import LABEL as OPTIMIZER
from rft.strategy.offload.optimizer import OptimizerOffload
from rft.strategy.parallel.context import Context
from rft.strategy.parallel.experts import ExpertParallel, find_experts
from rft.strategy.parallel.groups import check_groups, group_meshes
from rft.strategy.parallel.tensor import TensorParallel
from rft.strategy.parallel.tp_plan import tp_plan
from rft.strategy.peak_tflops import known_peak


class FSDP2(Strategy):
    """Shards a network over all ranks.

    Args:
        world: supplied by the run.
        device: where to compute; read when the processes start, before this object is made.
        dtype: what forward and backward compute in; master weights are float32. For `auto` see `chosen_dtype`.
        reduce_dtype: the dtype in which gradients are summed over ranks.
        reshard_after_forward: true frees gathered blocks between forward and backward (less memory); false keeps them
            from the first forward of an update to its last backward (faster).
        accumulate: `sharded` reduces the gradient after every micro-batch; `whole` keeps it whole and reduces it once
            an update.
        replicas: number of groups that each hold all the weights (HSDP); a group shards them over
            world size / replicas ranks.
        context_parallel: number of ranks that compute each sequence together, a slice of its tokens each.
        tensor_parallel: number of ranks that compute each sequence together with a part of each weight matrix of the
            blocks, and some of its experts; all other weights are sharded.
        expert_parallel: number of ranks that each hold some experts of every layer and exchange tokens.
        activation_checkpointing: which activations of the blocks are computed again in the backward pass.
        param_offload: models whose sharded weights, gradients and optimizer state are in host memory (pinned for a
            GPU): `none`, `frozen` (those that never train) or `all`. Blocks are copied to the device to compute.
        optimizer_offload: the optimizer state is in host memory between the steps of the optimizer.
        activation_offload: what the blocks keep for the backward pass is in host memory until then.
        attention: the kernel for the attention of packed rows; `auto` takes the first of flash, varlen and sdpa that
            the device, the dtype, the installed packages and the model allow.
        cudnn_attention: `scaled_dot_product_attention` may choose the kernel of cuDNN; read by `join`.
        deterministic: torch computes with deterministic kernels alone, and fails where there is none; read by `join`.
        compile: compiles the blocks, once for all of them and all lengths; on a GPU also the log-probabilities.
        fp8: torchao's recipe for float8 products in the linear layers of the blocks that train; null: none.
        peak_tflops: the peak of one device for `throughput/mfu`; null: that of a known GPU in this dtype.

    Raises:
        ValueError: names the key where an option does not fit the number of processes or another option.
    """

    shards_meta: ClassVar[bool] = True
    memory_labels: ClassVar[Mapping[str, str]] = {
        "FSDP::": "gathered",
        "full_tensor": "gathered",
        OPTIMIZER: f"optimizer{HOST}",
        ACTIVATIONS: f"activations{HOST}",
    }

    def __init__(
        self,
        world: World,
        device: Literal["auto", "cpu", "cuda"],
        dtype: Literal["auto", "float32", "bfloat16", "float16"],
        reduce_dtype: Literal["float32", "bfloat16"],
        reshard_after_forward: bool,
        accumulate: Literal["sharded", "whole"],
        replicas: PositiveInt,
        context_parallel: PositiveInt,
        tensor_parallel: PositiveInt,
        expert_parallel: PositiveInt,
        activation_checkpointing: Literal["none", "full", "selective"],
        param_offload: Literal["none", "frozen", "all"],
        optimizer_offload: bool,
        activation_offload: bool,
        attention: Attention,
        cudnn_attention: bool,
        deterministic: bool,
        compile: bool,
        fp8: Fp8 | None,
        peak_tflops: PositiveFloat | None,
    ) -> None:
        sizes = {"replicas": replicas, "context_parallel": context_parallel, "tensor_parallel": tensor_parallel}
        check_groups(world.size, sizes | {"expert_parallel": expert_parallel}, compile)
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
        if param_offload == "all" and optimizer_offload:
            raise ValueError(
                "strategy.optimizer_offload=true: with strategy.param_offload=all the optimizer state is in host "
                "memory already; set strategy.optimizer_offload=false, or strategy.param_offload=none or frozen"
            )
        if activation_offload and activation_checkpointing == "selective":
            raise ValueError(
                "strategy.activation_offload=true cannot move the results that strategy.activation_checkpointing="
                "selective keeps; set strategy.activation_checkpointing=none or full, or "
                "strategy.activation_offload=false"
            )
        context = Context(world, context_parallel) if context_parallel > 1 else None
        name = chosen_dtype(dtype, device)
        super().__init__(world, DTYPES[name], context, attention, "cuda" if device == "cuda" else None, compile)
        self._reshard = reshard_after_forward
        self._accumulate = accumulate
        self._checkpointing = activation_checkpointing
        self._param_offload = param_offload
        self._optimizer_offload = optimizer_offload
        self._activation_offload = activation_offload
        self._fp8 = fp8
        self._peak_tflops = peak_tflops
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if name == "float32" else DTYPES[name],  # None casts no inputs either
            reduce_dtype=DTYPES[reduce_dtype],
        )
        self._mesh = self._block_mesh = world.mesh
        self._experts: ExpertParallel | None = None
        if replicas > 1:
            shape = (replicas, world.size // replicas)
            self._mesh = world.new_mesh(shape, ("replicate", "shard"))
            self._block_mesh = self._mesh
        if tensor_parallel > 1:
            self.context = TensorParallel(world, tensor_parallel, replicas)
            self._block_mesh = self.context.data
            self._experts = self.context.experts
        elif expert_parallel > 1:
            self._experts = ExpertParallel(*group_meshes(world, expert_parallel, replicas))

    @classmethod
    def device(cls, options: Mapping[str, Any]) -> str:
        """See `Strategy.device`."""
        return str(options["device"])

    @classmethod
    def join(cls, options: Mapping[str, Any]) -> World:
        """See `Strategy.join`. A job of a sweep undoes what the one before has set."""
        if options["deterministic"]:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
        torch.use_deterministic_algorithms(options["deterministic"])
        fills = not options["deterministic"]  # new memory with NaN in that mode, which takes time
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(options["cudnn_attention"])
        return super().join(options)

    def peak_tflops(self) -> float | None:
        """See `Strategy.peak_tflops`."""
        device = self.world.device
        if self._peak_tflops is not None or device.type != "cuda":
            return self._peak_tflops
        return known_peak(torch.cuda.get_device_name(device), self.dtype)

    def offloads(self, trains: bool) -> bool:
        """See `Strategy.offloads`."""
        return self._param_offload == "all" or (self._param_offload == "frozen" and not trains)

    @classmethod
    def unset_offloads(cls, options: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """See `Strategy.unset_offloads`. Some do not go together with other options; `check` refuses these."""
        choices = {"param_offload": ("frozen", "all"), "optimizer_offload": (True,), "activation_offload": (True,)}
        offers = [(name, value) for name, values in choices.items() for value in values]
        return [(name, value) for name, value in offers if options[name] not in (value, "all")]

    @classmethod
    def compute_dtype(cls, options: Mapping[str, Any]) -> str:
        """See `Strategy.compute_dtype`."""
        return chosen_dtype(options["dtype"], options["device"])

    @classmethod
    def settled(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `Strategy.settled`."""
        return {"dtype": cls.compute_dtype(options)} if options["dtype"] == AUTO else {}

    @classmethod
    def reference_options(cls, options: Mapping[str, Any], dtype: str) -> dict[str, Any]:
        """The same options in another dtype, not compiled, without float8; see `Strategy.reference_options`."""
        return {**options, "dtype": dtype, "attention": "sdpa", "compile": False, "fp8": None}

    @classmethod
    def rounding_options(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `Strategy.rounding_options`."""
        return {name: options[name] for name in ("fp8",) if options[name] is not None}

    @classmethod
    def scoring_options(cls, options: Mapping[str, Any], dtype: str, offload: bool) -> dict[str, Any]:
        """See `Strategy.scoring_options`. A group of `replicas` holds the model once."""
        return {
            **cls.reference_options(options, dtype),
            "attention": "auto",
            "reshard_after_forward": True,
            "context_parallel": 1,
            "tensor_parallel": 1,
            "expert_parallel": 1,
            "param_offload": "all" if offload else "none",
            "optimizer_offload": False,
            "activation_offload": False,
        }

    @classmethod
    def check(cls, options: Mapping[str, Any], models: Mapping[str, ModelFacts]) -> None:
        """See `Strategy.check`."""
        check = Checks()
        check.messages += model_errors(options, models)
        check.attempt(check_attention, options["attention"], options["device"], DTYPES[cls.compute_dtype(options)])
        check.end()

    def check_model(
        self, config: PretrainedConfig, meta_model: Callable[[], PreTrainedModel], packing: bool, key: str
    ) -> None:
        """See `Strategy.check_model`."""
        if self.context is not None:
            self.context.check_model(config, packing, key)
        if isinstance(self.context, TensorParallel):
            tp_plan(meta_model().base_model, self.context, key)
        elif self._experts is not None:
            self._experts.check_model(meta_model().base_model, key)
        if self._fp8 is not None:
            check_layers(meta_model().base_model, self._fp8, key)

    def parallelize(self, backbone: PreTrainedModel, key: str) -> None:
        """See `Strategy.parallelize`."""
        if isinstance(self.context, TensorParallel):
            shards = tp_plan(backbone, self.context, key)
            self.context.apply_tensor_parallel(backbone, backbone.get_submodule("rotary_emb"), shards)
        if self._experts is not None:
            for experts in find_experts(backbone).values():
                self._experts.split(experts)

    def shard(self, network: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Shards the blocks one by one, and all other weights with the root; see `Strategy.shard`."""
        device = self.world.device
        trains = any(parameter.requires_grad for parameter in network.parameters())
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if self.offloads(trains) else OffloadPolicy()
        shard = partial(fully_shard, mp_policy=self._policy, offload_policy=offload)
        activations = ActivationOffload(device) if self._activation_offload and trains else None
        for block in blocks:
            if self._fp8 is not None:
                use_fp8(block, self._fp8)
            if self.compile:
                block.forward = compile_function(block.forward)
            if self._checkpointing != "none":
                recompute(block, self._checkpointing)
            if activations is not None:
                activations.wrap(block)
            self._shard_experts(block, offload)
            shard(block, mesh=self._block_mesh, reshard_after_forward=self._reshard)
        # None: the weights of the root are needed first in the backward pass, so they stay gathered
        shard(network, mesh=self._mesh, reshard_after_forward=None if self._reshard else False)
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
                    reshard_after_forward=self._reshard,
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
        """See `Strategy.begin_training`."""
        state = super().begin_training(network, make, max_grad_norm)
        if self._optimizer_offload:
            OptimizerOffload(state.optimizer, self.world.device)
        return state

    def backward(self, network: nn.Module, loss: Tensor, last: bool) -> None:
        """Adds the gradient of one micro-batch of an update; see `Strategy.backward`.

        Replicas exchange their sums once an update, or after every micro-batch where `reduce_dtype` is not float32.

        Args:
            last: no other micro-batch of the update follows; gradients are reduced and weights resharded then.
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
                    shard = tensor.to(self.world.device, copy=self._param_offload == "all")
                    assert isinstance(shard, DTensor)
                    whole = gather(shard, options)
                    del shard
            del tensor
            if taken and whole is not None:
                yield name, whole
            del whole  # before the next one is gathered

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """See `Strategy.clip_grad_norm`."""
        if self._experts is not None:
            return clip_grad_norm(parameters, max_norm, self.world)
        norm = nn.utils.clip_grad_norm_(list(parameters), max_norm)
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).to(self.world.device)

    def model_state(self, network: nn.Module, with_frozen: bool) -> dict[str, Any]:
        """See `Strategy.model_state`."""
        left_out = set() if with_frozen else _frozen(network)
        named = {id(tensor): (name, tensor) for name, tensor in reversed(network.state_dict(keep_vars=True).items())}
        return {name: tensor.detach() for name, tensor in reversed(named.values()) if name not in left_out}

    def load_model_state(self, network: nn.Module, state: dict[str, Any]) -> None:
        """See `Strategy.load_model_state`."""
        own = self.model_state(network, with_frozen=True)
        missing = own.keys() - state.keys() - _frozen(network)
        assert not missing, f"the state lacks {sorted(missing)}"
        with torch.no_grad():
            for name, tensor in state.items():
                own[name].copy_(tensor)

    def optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """See `Strategy.optimizer_state`."""
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        state = {names[id(parameter)]: dict(own) for parameter, own in optimizer.state.items()}
        groups = [
            {**group, "params": [names[id(each)] for each in group["params"]]} for group in optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, network: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """See `Strategy.load_optimizer_state`."""
        own = self.optimizer_state(network, optimizer)["param_groups"]
        order = [name for group in own for name in group["params"]]  # the optimizer counts its parameters in this order
        numbers = {name: number for number, name in enumerate(order)}
        groups = [
            {**saved, "params": [numbers[name] for name in group["params"]]}
            for saved, group in zip(state["param_groups"], own, strict=True)
        ]
        by_number = {numbers[name]: values for name, values in state["state"].items()}
        optimizer.load_state_dict({"state": by_number, "param_groups": groups})


def _frozen(network: nn.Module) -> set[str]:
    return {name for name, p in network.named_parameters(remove_duplicate=False) if not p.requires_grad}
