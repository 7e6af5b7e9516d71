"""The tensors that each rank of a real run holds at the peak of each stage, of the configs of a file.

torchrun --nproc-per-node 2 runs_on_ranks.py configs.json found.json
"""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from rft.actor.actor import Actor
from rft.distributed import leave
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.rollout.source.rollout import RolloutSource
from rft.setup.assembly import Job
from rft.strategy.fsdp2 import FSDP2
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.trainer import Trainer

STAGES: dict[str, tuple[type, str]] = {  # the methods in which a run is in a stage of the plan
    "load": (Job, "assemble"),
    "rollout": (RolloutSource, "next"),
    "annotate": (Trainer, "compute_columns"),
    "update": (Trainer, "update"),
    "sync": (Trainer, "refresh"),
    "export": (Actor, "save_model"),
    "save": (Checkpoints, "_stage"),
}


def staged(tracker: MemoryTracker, stage: str, function: Callable) -> Callable:
    def watched(*arguments: Any, **options: Any) -> Any:
        with tracker.stage(stage):
            return function(*arguments, **options)

    return watched


def counted(config: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes of each term at the peak of each stage of a run. What a checkpoint serializes is no tensor."""
    tracker = MemoryTracker(FSDP2.memory_labels)
    with ExitStack() as stack:
        for stage, (owner, name) in STAGES.items():
            stack.enter_context(patch.object(owner, name, staged(tracker, stage, vars(owner)[name])))
        stack.enter_context(tracker.watch())
        Job(config).fit("")
    return tracker.peaks()


def main() -> None:
    torch.set_num_threads(1)
    found = {name: counted(config) for name, config in json.loads(Path(sys.argv[1]).read_text()).items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(ranks))
    leave()


if __name__ == "__main__":
    main()
