"""Exports sharded models, file by file and as `save_pretrained` writes whole ones, on any number of ranks.

torchrun --nproc-per-node 2 export_on_ranks.py results.pt
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rft.actor.actor import Actor
from rft.actor.loading import export
from rft.actor.loading.stored import open_tensors
from rft.actor.model import set_end_tokens
from rft.distributed import World, leave, start
from tests.actor.loading.stored_on_ranks import EXPERTS, MODELS, TINY
from tests.helpers import OPTIMIZER, make_actor, make_optimizer, make_strategy, yaml_options

FILE_BYTES = 6000  # less than a block
LORA = {"rank": 3, "targets": ["self_attn.*"]}
CASES: dict[str, dict[str, Any]] = {
    "one file": {"model": TINY, "file_bytes": 2**20},
    "several files": {"model": TINY},
    "tied": {"model": MODELS["tied"]},
    "tied, averaged": {"model": MODELS["tied"], "ema": 0.5},
    "experts": {"model": EXPERTS},
    "value head": {"model": TINY, "head": "value", "key": "critic"},
    "score head": {"model": TINY, "head": "score"},
    "step head": {"model": MODELS["tied"], "head": "step"},
    "frozen in bfloat16": {"model": TINY, "frozen": ["model.layers.0.*"], "dtype": "bfloat16"},
    "lora": {"model": MODELS["tied"], "lora": LORA, "dtype": "bfloat16"},
    "nf4": {"model": TINY, "lora": LORA | {"quantize": "nf4"}, "dtype": "bfloat16"},
    "offloaded": {"model": TINY, "param_offload": "all"},
}
SPLIT = {"split": {"model": MODELS["llama"], "tensor_parallel": 2}}


def build(
    world: World,
    model: dict[str, Any],
    lora: dict[str, Any] | None = None,
    dtype: str = "float32",
    param_offload: str = "none",
    tensor_parallel: int = 1,
    **options: Any,
) -> Actor:
    strategy = make_strategy(world, dtype=dtype, param_offload=param_offload, tensor_parallel=tensor_parallel)
    adapters = None if lora is None else yaml_options("actor/lora/lora.yaml", **lora)
    optimizer = make_optimizer(**OPTIMIZER)
    return make_actor(world, strategy, optimizer, path=None, model_config=model, lora=adapters, **options)


def save_whole(actor: Actor, folder: Path, file_bytes: int) -> None:
    """What `save_pretrained` writes of the gathered model in float32."""
    state = {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in actor.weights()}
    model = actor.plain_model()
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    set_end_tokens(model, actor.tokenizer)
    model.save_pretrained(folder, max_shard_size=file_bytes)


def contents(folder: Path) -> dict[str, Any]:
    """The tensors of a folder, the names of each file, and the texts of the other files but the tokenizer's."""
    files = sorted(folder.glob("*.safetensors"))
    found = [load_file(file) for file in files]
    with open_tensors([str(file) for file in files]) as tensors:
        names = sorted(tensors)
    texts = {file.name: file.read_text() for file in folder.glob("*.json") if not file.name.startswith("tokenizer")}
    return {
        "tensors": {name: tensor for part in found for name, tensor in part.items()},
        "names": names,
        "files": {file.name: sorted(part) for file, part in zip(files, found, strict=True)},
        "bytes": [sum(tensor.nbytes for tensor in part.values()) for part in found],
        "texts": texts,
    }


def both(world: World, folder: Path, file_bytes: int = FILE_BYTES, **case: Any) -> dict[str, Any] | None:
    """The contents of both exports of a model, on rank 0."""
    export.FILE_BYTES = file_bytes
    actor = build(world, **case)
    actor.save_model(folder / "sharded")
    save_whole(actor, folder / f"whole {world.rank}", file_bytes)
    if world.rank != 0:
        return None
    return {"sharded": contents(folder / "sharded"), "whole": contents(folder / "whole 0")}


def fail(world: World, folder: Path) -> list[str]:
    """The error of each rank where rank 0 cannot write its second file; a collective works afterwards."""
    export.FILE_BYTES = FILE_BYTES
    actor, problem = build(world, TINY), ""
    names = export.file_layout(actor.plain_model(), torch.float32).filename_to_tensors
    if world.rank == 0:
        (folder / "broken" / list(names)[1]).mkdir(parents=True)
    try:
        actor.save_model(folder / "broken")
    except (OSError, SafetensorError) as error:
        problem = type(error).__name__
    return world.gather(problem)


def perform(world: World, folder: Path) -> dict[str, Any]:
    cases = CASES | (SPLIT if world.size > 1 else {})
    found: dict[str, Any] = {name: both(world, folder / name, **case) for name, case in cases.items()}
    return found | {"errors": fail(world, folder)}


def main() -> None:
    torch.set_num_threads(1)
    world = start("cpu")
    with tempfile.TemporaryDirectory() as name:
        results = perform(world, Path(world.decide(lambda: name)))
        if world.rank == 0:
            torch.save(results, Path(sys.argv[1]))
        world.gather(None)
    leave()


if __name__ == "__main__":
    main()
