"""Weights, gradients and optimizer state in host memory: the models that this does not suit."""

from collections.abc import Iterator, Mapping

from rft.strategy.base import ModelFacts


def param_offload_errors(option: str, models: Mapping[str, ModelFacts]) -> Iterator[str]:
    """A message for every model that `strategy.param_offload` does not suit, with the key and the cure."""
    if option == "frozen" and all(facts.optimizers for facts in models.values()):
        yield "strategy.param_offload=frozen: all models of the run train; set it to all, or to none"
    for key, facts in models.items() if option == "all" else ():
        for name in (name for name, optimizer in facts.optimizers.items() if optimizer == "muon"):
            yield (
                f"{name}.optimizer.name=muon: with strategy.param_offload=all the CPU would orthogonalize the matrices "
                f"slowly; set {name}.optimizer.name=adamw, or strategy.param_offload=none and "
                "strategy.optimizer_offload=true"
            )
        if facts.quantized:
            yield (
                f"{key}.lora.quantize: packed weights cannot be merged in host memory; set {key}.lora.quantize=null, "
                "or strategy.param_offload=none"
            )
