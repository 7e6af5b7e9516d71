"""What options of `FSDP2` and the models of a run do not allow together."""

from collections.abc import Iterator, Mapping
from typing import Any

from rft.distributed import device_kind
from rft.strategy.base import ModelFacts
from rft.strategy.fp8 import fp8_errors
from rft.strategy.offload.parameters import param_offload_errors
from rft.strategy.parallel.groups import SPLITS, split_errors


def model_errors(options: Mapping[str, Any], models: Mapping[str, ModelFacts]) -> Iterator[str]:
    """A message for every option that does not suit a model, with the key and the cure.

    Args:
        options: of `FSDP2`.
        models: by their yaml keys.
    """
    yield from split_errors({name: options[name] for name in SPLITS}, models)
    yield from param_offload_errors(options["param_offload"], models)
    yield from fp8_errors(options, models)
    fused = [key for key, facts in models.items() if facts.liger]  # other models inherit the actor's
    if fused and device_kind(options["device"]) == "cpu":
        yield (
            f"{fused[0]}.liger=true: Liger's kernels are written in Triton and need a GPU, and with "
            f"strategy.device={options['device']} this machine computes on its CPU; set {fused[0]}.liger=false"
        )
    for key, facts in models.items():
        if options["peak_tflops"] is not None and facts.partly_frozen:
            yield (
                f"strategy.peak_tflops={options['peak_tflops']}: throughput/mfu counts models all of whose weights "
                f"train; set {key}.lora=null and {key}.frozen=[], or strategy.peak_tflops=null"
            )
        for name in ("context_parallel", "tensor_parallel", "expert_parallel"):
            if facts.media and options[name] > 1:
                yield (
                    f"strategy.{name}={options[name]}: the {key} takes media (actor.processor), which ranks cannot "
                    "share yet; set it to 1"
                )
        for name in ("context_parallel", "tensor_parallel"):
            if facts.own_rows and options[name] > 1:
                yield (
                    f"strategy.{name}={options[name]}: with {key}.head={facts.head} every rank reads the tokens of "
                    "its own rows; set it to 1"
                )
        if options["compile"] and facts.hooked:
            yield (
                f"strategy.compile: {facts.hooked[0]} is recorded by hooks in the blocks of the {key}, which do "
                "not run with it; take it out, or leave strategy.compile at its default"
            )
