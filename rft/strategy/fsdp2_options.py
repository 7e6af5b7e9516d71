"""The options of `FSDP2`, and what they and the models of a run do not allow together."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from rft.distributed import World, device_kind
from rft.errors import Checks
from rft.imports import import_part
from rft.ranges import PositiveFloat, PositiveInt
from rft.strategy.attention import Attention, check_attention
from rft.strategy.base import AUTO, DTYPES, ModelFacts, StrategyOptions, chosen_dtype

Fp8 = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]  # torchao's names of its recipes
# Dense TFLOPS in bfloat16 and float16, of NVIDIA's data sheets; the first name that the device's name contains counts.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
}


@dataclass(frozen=True)
class FSDP2Options(StrategyOptions):
    """What `FSDP2` reads.

    Args:
        device: where to compute; read when the processes start, before there is a strategy.
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

    """

    device: Literal["auto", "cpu", "cuda"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    reduce_dtype: Literal["float32", "bfloat16"]
    reshard_after_forward: bool
    accumulate: Literal["sharded", "whole"]
    replicas: PositiveInt
    context_parallel: PositiveInt
    tensor_parallel: PositiveInt
    expert_parallel: PositiveInt
    activation_checkpointing: Literal["none", "full", "selective"]
    param_offload: Literal["none", "frozen", "all"]
    optimizer_offload: bool
    activation_offload: bool
    attention: Attention
    cudnn_attention: bool
    deterministic: bool
    compile: bool
    fp8: Fp8 | None
    peak_tflops: PositiveFloat | None

    def group_sizes(self) -> dict[str, int]:
        """The numbers of groups and of their ranks, by their keys."""
        names = ("replicas", "context_parallel", "tensor_parallel", "expert_parallel")
        return {name: vars(self)[name] for name in names}

    def part(self, option: str, module: str, name: str) -> Any:
        """What the value of an option needs of a part, which a run imports that sets it.

        Args:
            module: of the part, in this package.
            name: of the function or the class.

        Raises:
            ValueError: the part has been taken out.
        """
        return import_part(f"{__package__}.{module}", name, f"strategy.{option}={vars(self)[option]}")

    def device_name(self) -> str:
        return self.device

    def settled(self) -> dict[str, Any]:
        return {"dtype": self.compute_dtype()} if self.dtype == AUTO else {}

    def join(self) -> World:
        """Also sets how torch computes; a job of a sweep undoes what the one before has set."""
        if self.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first product
        torch.use_deterministic_algorithms(self.deterministic)
        fills = not self.deterministic  # new memory with NaN in that mode, which takes time
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
        torch.backends.cuda.enable_cudnn_sdp(self.cudnn_attention)
        return super().join()

    def compute_dtype(self) -> str:
        return chosen_dtype(self.dtype, self.device)

    def reference_options(self, dtype: str) -> "FSDP2Options":
        """The same options in another dtype, not compiled, without float8."""
        changes: dict[str, Any] = {"dtype": dtype, "attention": "sdpa", "compile": False, "fp8": None}
        return replace(self, **changes)

    def rounding_options(self) -> dict[str, Any]:
        return {} if self.fp8 is None else {"fp8": self.fp8}

    def scoring_options(self, dtype: str, offload: bool) -> "FSDP2Options":
        """A group of `replicas` holds the model once."""
        return replace(
            self.reference_options(dtype),
            attention="auto",
            reshard_after_forward=True,
            context_parallel=1,
            tensor_parallel=1,
            expert_parallel=1,
            param_offload="all" if offload else "none",
            optimizer_offload=False,
            activation_offload=False,
        )

    def unset_offloads(self) -> list[tuple[str, Any]]:
        """Some do not go together with other options; `check` refuses these."""
        choices = {"param_offload": ("frozen", "all"), "optimizer_offload": (True,), "activation_offload": (True,)}
        offers = [(name, value) for name, values in choices.items() for value in values]
        return [(name, value) for name, value in offers if vars(self)[name] not in (value, "all")]

    def check(self, models: Mapping[str, ModelFacts]) -> None:
        check = Checks()
        check.messages += [*self._own_errors(), *self._model_errors(models)]
        check.attempt(check_attention, self.attention, self.device, DTYPES[self.compute_dtype()])
        check.end()

    def _own_errors(self) -> Iterator[str]:
        """A message for every option that does not go together with another one."""
        if self.accumulate == "whole" and self.reduce_dtype != "float32":
            yield (
                f"strategy.accumulate=whole adds up micro-batches in strategy.reduce_dtype={self.reduce_dtype}, which "
                "loses small gradients; set strategy.reduce_dtype=float32 or strategy.accumulate=sharded"
            )
        if self.compile and self.activation_checkpointing == "selective":
            yield (
                "strategy.activation_checkpointing=selective cannot see the operations of compiled blocks, which by "
                "themselves compute again what is fast; set strategy.activation_checkpointing=none or full, or "
                "strategy.compile=false"
            )
        if self.param_offload == "all" and self.optimizer_offload:
            yield (
                "strategy.optimizer_offload=true: with strategy.param_offload=all the optimizer state is in host "
                "memory already; set strategy.optimizer_offload=false, or strategy.param_offload=none or frozen"
            )
        if self.activation_offload and self.activation_checkpointing == "selective":
            yield (
                "strategy.activation_offload=true cannot move the results that strategy.activation_checkpointing="
                "selective keeps; set strategy.activation_checkpointing=none or full, or "
                "strategy.activation_offload=false"
            )

    def _model_errors(self, models: Mapping[str, ModelFacts]) -> Iterator[str]:
        """A message for every option that does not suit a model, with the key and the cure."""
        sizes = self.group_sizes()
        if split := [name for name in ("tensor_parallel", "expert_parallel") if sizes[name] > 1]:
            yield from self.part(split[0], "parallel.groups", "split_errors")(sizes, models)
        yield from self._param_offload_errors(models)
        if self.fp8 is not None:
            fp8_errors = self.part("fp8", "fp8", "fp8_errors")
            yield from fp8_errors(self.fp8, self.device, self.dtype, self.tensor_parallel, models)
        fused = [key for key, facts in models.items() if facts.liger]  # other models inherit the actor's
        if fused and device_kind(self.device) == "cpu":
            yield (
                f"{fused[0]}.liger=true: Liger's kernels are written in Triton and need a GPU, and with "
                f"strategy.device={self.device} this machine computes on its CPU; set {fused[0]}.liger=false"
            )
        for key, facts in models.items():
            if self.peak_tflops is not None and facts.partly_frozen:
                yield (
                    f"strategy.peak_tflops={self.peak_tflops}: throughput/mfu counts models all of whose weights "
                    f"train; set {key}.lora=null and {key}.frozen=[], or strategy.peak_tflops=null"
                )
            for name in ("context_parallel", "tensor_parallel", "expert_parallel"):
                if facts.media and sizes[name] > 1:
                    yield (
                        f"strategy.{name}={sizes[name]}: the {key} takes media (actor.processor), which ranks cannot "
                        "share yet; set it to 1"
                    )
            for name in ("context_parallel", "tensor_parallel"):
                if facts.own_rows and sizes[name] > 1:
                    yield (
                        f"strategy.{name}={sizes[name]}: with {key}.head={facts.head} every rank reads the tokens of "
                        "its own rows; set it to 1"
                    )
            if self.compile and facts.hooked:
                yield (
                    f"strategy.compile: {facts.hooked[0]} is recorded by hooks in the blocks of the {key}, which do "
                    "not run with it; take it out, or leave strategy.compile at its default"
                )

    def _param_offload_errors(self, models: Mapping[str, ModelFacts]) -> Iterator[str]:
        """A message for every model whose weights cannot be in host memory, with the key and the cure."""
        if self.param_offload == "frozen" and all(facts.optimizers for facts in models.values()):
            yield "strategy.param_offload=frozen: all models of the run train; set it to all, or to none"
        for key, facts in models.items() if self.param_offload == "all" else ():
            for name in (name for name, optimizer in facts.optimizers.items() if optimizer == "muon"):
                yield (
                    f"{name}.optimizer.name=muon: with strategy.param_offload=all the CPU would orthogonalize the "
                    f"matrices slowly; set {name}.optimizer.name=adamw, or strategy.param_offload=none and "
                    "strategy.optimizer_offload=true"
                )
            if facts.quantized:
                yield (
                    f"{key}.lora.quantize: packed weights cannot be merged in host memory; set "
                    f"{key}.lora.quantize=null, or strategy.param_offload=none"
                )


def known_peak(device: str, dtype: torch.dtype) -> float | None:
    """The dense peak of a GPU by its name, or None where it is not known.

    float32 is not known: its peak depends on whether the products of matrices are rounded to TF32.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)
