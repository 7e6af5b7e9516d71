"""Loads, exports, syncs or publishes a sharded model in two ways.

torchrun model_io_side.py load|export|sync|publish <folder> <repeats>
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.utils import logging

from bench.checkpoint_side import resident
from rft.actor.actor import Actor
from rft.actor.base import ModelContext
from rft.distributed import World, leave, start
from rft.main import CONFIG_FOLDER
from rft.rollout.engine.base import EngineContext
from rft.rollout.engine.hf import HFEngine, HFOptions
from rft.rollout.server.weights.store import WeightStore
from rft.strategy.fsdp2 import FSDP2

OPTIONS: dict[str, Any] = {
    "model_config": None,
    "head": "lm",
    "micro_batch_tokens": 1,
    "packing": False,
    "share_prefix": False,
    "liger": False,
    "frozen": [],
    "ema": None,
    "lora": None,
    "optimizer": None,
    "trust_remote_code": False,
}


class WholeFirst(FSDP2):
    """Every rank loads the whole model by `from_pretrained`, then shards it."""

    shards_meta = False


def main(section: str, folder: Path, repeats: int) -> None:
    """Writes `<section>.json` into the folder."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    world = start("cpu")
    sides: dict[str, Callable[[], Any]]
    if section == "load":
        sides = {"rft": lambda: load(world, folder, FSDP2), "whole": lambda: load(world, folder, WholeFirst)}
    elif section == "sync":
        actor = load(world, folder, FSDP2)
        sides = {"rft": lambda: sync(actor, "bfloat16"), "whole": lambda: sync(actor, "float32")}
    elif section == "publish":
        actor = load(world, folder, FSDP2)
        store = WeightStore(folder / "weights", None, torch.bfloat16, world)
        sides = {
            "rft": lambda: publish(actor, store),
            "whole": lambda: write_whole(actor, folder / "whole.safetensors"),
        }
    else:
        actor = load(world, folder, FSDP2)
        sides = {"rft": lambda: actor.save_model(folder / "out"), "whole": lambda: save_whole(actor, folder / "out")}
    found = {name: measure(world, work, repeats) for name, work in sides.items()}
    if world.rank == 0:
        (folder / f"{section}.json").write_text(json.dumps(found))
    leave()


def load(world: World, folder: Path, kind: type[FSDP2]) -> Actor:
    """The model as a run with the default strategy has it."""
    options: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_FOLDER / "strategy" / "fsdp2.yaml"))
    del options["_target_"]
    strategy = kind(FSDP2.Options(**options), world)
    path = str(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    return Actor(ModelContext("actor", world, strategy, tokenizer, 0), Actor.Options(path=path, **OPTIONS))


def save_whole(actor: Actor, folder: Path) -> None:
    """Gathers all tensors on every rank; rank 0 writes them."""
    state = {name: tensor.to("cpu", torch.float32) for name, tensor in actor.weights()}
    if actor.world.rank == 0:
        model = actor.plain_model()
        model.load_state_dict(state, assign=True)
        model.tie_weights()
        model.save_pretrained(folder)


def sync(actor: Actor, dtype: Literal["bfloat16", "float32"]) -> None:
    """Gives the weights to an engine `hf` on every rank, which sleeps afterwards."""
    context = EngineContext(
        actor.world, actor.plain_model(), actor.tokenizer, Path(), engine_args={}, lora=None, dtype=torch.float32
    )
    engine = HFEngine(HFOptions(max_rows=1, dtype=dtype, cuda_graphs=False), context)
    engine.update_weights(0, actor.weights(engine.gather_options))
    engine.sleep()


def publish(actor: Actor, store: WeightStore) -> None:
    """Writes other weights for servers."""
    change(actor)
    store.keep(store.write(0, actor.weights(store.gather_options)))


def write_whole(actor: Actor, path: Path) -> None:
    """Gathers other weights on every rank; rank 0 writes them."""
    change(actor)
    state = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in actor.weights()}
    if actor.world.rank == 0:
        save_file(state, path)


@torch.no_grad()
def change(actor: Actor) -> None:
    """Changes all weights, as an update does."""
    for parameter in actor.network.parameters():
        parameter.mul_(1.01)


def measure(world: World, work: Callable[[], Any], repeats: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, and the growth of the resident memory at its peak, after a first time."""
    found: dict[str, list[float]] = {name: [] for name in ("seconds", "first_mib", "last_mib")}
    for number in range(repeats + 1):
        gc.collect()  # the parts of a sharded model refer to each other
        dist.barrier()
        before, started = resident("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        work()
        seconds = max(world.gather(time.perf_counter() - started))
        grown = world.gather(resident("VmHWM") - before)
        if number > 0:
            for name, value in zip(found, (seconds, grown[0], grown[-1]), strict=True):
                found[name].append(value)
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
