"""Loads sharded models from folders on any number of ranks: what test_stored.py runs alone and under torchrun.

torchrun --nproc-per-node 2 stored_on_ranks.py folder results.pt
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rft.actor.actor import Actor
from rft.actor.heads import LanguageNetwork, ValueNetwork
from rft.actor.lora.nf4 import PackedLinear
from rft.batch.collate import dummy_row
from rft.distributed import World, leave, start
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.strategy.fsdp2 import FSDP2
from tests.helpers import MODEL, make_actor, make_batch, make_optimizer, make_strategy, yaml_options

TINY = MODEL | {"num_hidden_layers": 3}
LARGE = TINY | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16}
EXPERTS = TINY | {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
EVEN = {key: size for key, size in TINY.items() if key != "head_dim"} | {"hidden_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": TINY,
    "tied": TINY | {"tie_word_embeddings": True},
    "llama": EVEN | {"model_type": "llama"},
    "qwen2": EVEN | {"model_type": "qwen2", "tie_word_embeddings": True},
    "gemma2": TINY | {"model_type": "gemma2", "final_logit_softcapping": None, "attn_logit_softcapping": 20.0},
    "experts": EXPERTS,
    "even experts": EXPERTS | {"num_experts": 4},
    "large": LARGE,
}
LORA = {"rank": 3, "targets": ["self_attn.*"]}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"model": name} for name in MODELS if name != "gemma2"},
    "gemma2": {"model": "gemma2", "packing": False, "share_prefix": False},
    "bfloat16": {"model": "tied", "dtype": "bfloat16"},
    "value head": {"model": "qwen3", "head": "value", "trains": True},
    "score head": {"model": "qwen3", "head": "score"},
    "step head": {"model": "tied", "head": "step"},
    "tied, trains": {"model": "tied", "trains": True, "frozen": ["model.layers.0.*"]},
    "lora": {"model": "tied", "trains": True, "lora": LORA, "dtype": "bfloat16"},
    "nf4": {"model": "qwen3", "trains": True, "lora": LORA | {"quantize": "nf4"}, "dtype": "bfloat16"},
    "adapter": {"model": "adapter"},
    "adapter, value head": {"model": "adapter", "head": "value", "trains": True},
    "adapter, continued": {"model": "adapter", "trains": True, "lora": LORA},
    "pickled": {"model": "pickled"},
}
DRAWN: dict[str, dict[str, Any]] = {
    "drawn": {"model": "qwen3", "trains": True},
    "drawn, tied, bfloat16": {"model": "tied", "dtype": "bfloat16"},
    "drawn, experts": {"model": "experts"},
    "drawn, value head": {"model": "qwen3", "head": "value", "trains": True},
    "drawn, score head": {"model": "llama", "head": "score"},
    "drawn, step head": {"model": "tied", "head": "step"},
    "drawn, nf4": {"model": "qwen2", "trains": True, "lora": LORA | {"quantize": "nf4"}, "dtype": "bfloat16"},
}
PEAKS: dict[str, dict[str, Any]] = {
    "large": {"model": "large"},
    "nf4": {"model": "large", "trains": True, "lora": LORA | {"quantize": "nf4"}, "dtype": "bfloat16"},
    "adapter": {"model": "large adapter"},
    "pickled": {"model": "large pickled"},
    "drawn": {"model": "large", "drawn": True},
}
SPLIT: dict[str, dict[str, Any]] = {
    "split": {"model": "llama", "spread": {"tensor_parallel": 2}},
    "split, biases": {"model": "qwen2", "spread": {"tensor_parallel": 2}},
    "split, lora": {"model": "qwen2", "spread": {"tensor_parallel": 2}, "trains": True, "lora": LORA},
    "split experts": {"model": "even experts", "spread": {"expert_parallel": 2}},
    "drawn, split": {"model": "qwen2", "spread": {"tensor_parallel": 2}, "drawn": True},
    "drawn, split experts": {"model": "even experts", "spread": {"expert_parallel": 2}, "drawn": True},
}
CASES |= {name: case | {"drawn": True} for name, case in DRAWN.items()}


class WholeFirst(FSDP2):
    """Every rank loads the whole model by `from_pretrained`, or draws it by `from_config`, then shards it."""

    shards_meta = False


def build(
    world: World,
    kind: type[FSDP2],
    folder: Path,
    model: str,
    trains: bool = False,
    lora: dict[str, Any] | None = None,
    dtype: str = "float32",
    spread: dict[str, int] | None = None,
    drawn: bool = False,
    **options: Any,
) -> Actor:
    """The actor of a folder, or a new model of this shape."""
    strategy = make_strategy(world, kind, dtype=dtype, **(spread or {}))
    adapters = None if lora is None else yaml_options("actor/lora/lora.yaml", **lora)
    optimizer = make_optimizer() if trains else None
    key = {"value": "critic"}.get(options.get("head", "lm"), "actor")
    source: dict[str, Any] = {"path": str(folder / model), "model_config": None}
    if drawn:
        source = {"path": None, "model_config": MODELS[model]}
    return make_actor(world, strategy, optimizer, key=key, lora=adapters, **source, **options)


def columns(actor: Actor) -> dict[str, torch.Tensor]:
    """What a model computes; a forward gathers its shards."""
    batch, outputs = make_batch(), {LanguageNetwork: "logprobs", ValueNetwork: "values"}
    output = next((name for kind, name in outputs.items() if isinstance(actor.network, kind)), "score")
    return {output: actor.compute(batch, (output,), 1.0, dummy_row(batch, batch))[output]}


def contents(actor: Actor) -> dict[str, Any]:
    """Everything that loading decides: whole tensors, what trains, ties, scales of packed weights, what is exported."""
    network, plain = actor.network, actor.plain_model()
    parameters = dict(network.named_parameters(remove_duplicate=False))
    packed = {name: module for name, module in network.named_modules() if isinstance(module, PackedLinear)}
    return {
        "tensors": {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in network.state_dict().items()},
        "buffers": dict(network.named_buffers()),
        "columns": columns(actor),
        "trains": {name: (p.requires_grad, p.dtype) for name, p in parameters.items()},
        "ties": [[n for n, q in parameters.items() if q is p] for p in network.parameters()],
        "scales": {name: module.state.absmax for name, module in packed.items()},
        "generation": plain.generation_config.to_dict() if plain.can_generate() else {},
        "config": plain.config.to_dict(),
        "training": [module.training for module in network.modules()],
    }


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)  # packed weights are no numbers


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what is not the same in two `contents`; tensors are compared bit by bit."""
    found = []
    for part in one:
        if part in ("tensors", "buffers", "scales", "columns"):
            mine, theirs = one[part], other[part]
            names = mine.keys() & theirs.keys()
            found += sorted(mine.keys() ^ theirs.keys())
            found += sorted(name for name in names if not torch.equal(*map(as_bytes, (mine[name], theirs[name]))))
        elif one[part] != other[part]:
            found.append(part)
    return found


def peak(world: World, kind: type[FSDP2], folder: Path, model: str, **options: Any) -> tuple[int, int]:
    """Bytes of a loaded shard, and the most bytes that tensors have while it loads."""
    tracker = MemoryTracker({"reading": "loading"})  # one term: the peak of all at once
    with tracker.watch(), tracker.stage("load"):
        actor = build(world, kind, folder, model, **options)
    shard = sum(tensor.to_local().nbytes for tensor in actor.network.parameters())
    return shard, sum(tracker.peaks()["load"].values())


def perform(world: World, folder: Path) -> dict[str, Any]:
    cases = CASES | (SPLIT if world.size == 2 else {})
    results: dict[str, Any] = {"differences": {}, "score": None}
    for name, case in cases.items():
        mine, theirs = (contents(build(world, kind, folder, **case)) for kind in (FSDP2, WholeFirst))
        results["differences"][name] = world.gather(differences(mine, theirs))
        if name == "score head":
            results["score"] = mine["tensors"]["model.score.weight"]
    results["peaks"] = {"whole": world.gather(peak(world, WholeFirst, folder, "large"))}
    for name, case in PEAKS.items():
        results["peaks"][name] = world.gather(peak(world, FSDP2, folder, **case))
    return results


def main() -> None:
    torch.set_num_threads(1)
    world = start("cpu")
    results = perform(world, Path(sys.argv[1]))
    if world.rank == 0:
        torch.save(results, Path(sys.argv[2]))
    leave()


if __name__ == "__main__":
    main()
