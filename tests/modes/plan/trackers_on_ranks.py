"""What two updates of an actor hold on real ranks, and on as many that this process pretends to be one of.

torchrun --nproc-per-node 2 trackers_on_ranks.py found.json
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from rft.distributed import World, pretend, start, stop
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.modes.plan.skip_compute import SkipCompute
from rft.rollout.engine.hf import HFEngine
from rft.strategy.fsdp2 import FSDP2
from tests.helpers import TERMS, engine_context, make_algorithm, make_batch, small_actor, update


def watched(world: World, mode: SkipCompute | None) -> dict[str, dict[str, int]]:
    tracker = MemoryTracker(FSDP2.memory_labels)
    with mode or nullcontext(), tracker.watch():
        with mode.creating() if mode else nullcontext():
            actor = small_actor(world, cap=30)
        for number in range(2):
            with tracker.stage(f"update {number}"):
                update(actor, make_batch(), make_algorithm(terms=TERMS))
        with tracker.stage("weights"):
            tensors = [tensor for _, tensor in actor.weights()]
        assert tensors
        del tensors
        options = HFEngine.Options(max_rows=8, dtype=None, cuda_graphs=False)
        engine = HFEngine(options, engine_context(actor.plain_model(), actor.tokenizer, computes=torch.bfloat16))
        for stage in ("publish", "another publish"):
            with tracker.stage(stage):
                engine.update_weights(0, actor.weights(engine.gather_options))
        engine.sleep()
        with tracker.stage("asleep"):
            pass
    return tracker.peaks()


def main() -> None:
    torch.set_num_threads(1)
    world = start("cpu")
    size, rank, real = world.size, world.rank, watched(world, None)
    stop()
    with pretend(size) as world:
        pretended = watched(world, SkipCompute())
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps([real, pretended]))
    os._exit(0)  # threads of gloo may abort the interpreter's teardown, see `leave`


if __name__ == "__main__":
    main()
