"""Saves the state of a sharded model in two ways: torchrun checkpoint_side.py <folder> <size> <repeats>."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM

from bench.workload import SIZES
from rft.actor.init import blocks
from rft.distributed import World, leave, start
from rft.main import CONFIG_FOLDER
from rft.strategy.fsdp2 import FSDP2
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.checkpoint.options import CheckpointOptions

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
MIB = 2**20
Wait = Callable[[], Any]


def main(folder: Path, size: str, repeats: int) -> None:
    """Writes `checkpoint.json` into the folder."""
    torch.set_num_threads(1)
    world = start("cpu")
    options: Any = OmegaConf.to_container(OmegaConf.load(CONFIG_FOLDER / "strategy" / "fsdp2.yaml"))
    del options["_target_"]
    strategy = FSDP2(FSDP2.Options(**options), world)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SIZES[size]), dtype=torch.float32)
    strategy.shard(model, blocks(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    strategy.allocate_optimizer_state(optimizer)
    kept = CheckpointOptions(
        every=1, keep_last=1, keep_best=0, keep_every=0, export_every=1, fallback=None, export_dtype="auto"
    )
    checkpoints = Checkpoints(folder, kept, world, "accuracy", print)
    step = 0

    def sharded() -> Wait:
        nonlocal step
        step += 1
        state = {"network": strategy.model_state(model, True), "optimizer": strategy.optimizer_state(model, optimizer)}
        checkpoints.write(step, {"actors": {"actor": state}}, lambda path, dtype: None, None, False)
        return checkpoints.wait

    def gathered() -> Wait:
        state = {
            "network": get_model_state_dict(model, options=FULL),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=FULL),
        }
        if world.rank == 0:
            with (folder / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()
        return lambda: None

    found = {"rft": measure(world, sharded, repeats, folder), "gathered": measure(world, gathered, repeats, folder)}
    state_mib = sum(parameter.numel() for parameter in model.parameters()) * 12 / MIB
    if world.rank == 0:
        (folder / "checkpoint.json").write_text(json.dumps({**found, "state_mib": state_mib}))
    leave()


def measure(world: World, save: Callable[[], Wait], repeats: int, folder: Path) -> dict[str, list[float]]:
    """Seconds, and the growth of the resident memory at its peak, of each time after the first one."""
    found: dict[str, list[float]] = {
        name: [] for name in ("blocking_s", "whole_s", "first_mib", "last_mib", "files_mib")
    }
    for number in range(repeats + 1):
        dist.barrier()
        before, started = resident("VmRSS"), time.perf_counter()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        wait = save()
        blocking = time.perf_counter() - started
        wait()
        whole = time.perf_counter() - started
        grown = world.gather(resident("VmHWM") - before)
        if number > 0:
            files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            values = (max(world.gather(blocking)), max(world.gather(whole)), grown[0], grown[-1], files / MIB)
            for name, value in zip(found, values, strict=True):
                found[name].append(value)
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return found


def resident(name: str) -> float:
    """A number of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
