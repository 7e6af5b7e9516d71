"""What each rank of a real run holds at the peak of each stage, and what is planned, of the configs of a file.

torchrun --nproc-per-node 2 runs_on_ranks.py configs.json found.json
python runs_on_ranks.py configs.json found.json
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rft.actor.actor import Actor
from rft.actor.loading import export
from rft.distributed import stop
from rft.modes.plan.job import PlanJob
from rft.modes.plan.memory_tracker import MemoryTracker
from rft.rollout.source.rollout import RolloutSource
from rft.setup.assembly import Job
from rft.strategy.base import HOST
from rft.strategy.fsdp2 import FSDP2
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.trainer import Trainer

FILE_BYTES = 2**21  # of an exported model
ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 4000)))  # no answer ends by chance
RUN = (
    "steps=2",
    "eval.every=0",
    "rollout.max_new_tokens=32",
    "batch.prompts=4",
    "algorithm.group_size=4",
    "actor.micro_batch_tokens=512",
)
STAGES: dict[str, tuple[type, str]] = {  # the methods in which a run is in a stage of the plan
    "load": (Job, "assemble"),
    "rollout": (RolloutSource, "next"),
    "columns": (Trainer, "compute_columns"),
    "update": (Trainer, "update"),
    "publish": (Trainer, "publish"),
    "export": (Actor, "save_model"),
    "save": (Checkpoints, "_stage"),
}


def add_rows(config: dict[str, Any], folder: Path) -> None:
    """Gives a run rows that are as long as rows can be, from files in the folder."""
    prompts = [ALPHABET[start : start + 32] for start in range(0, 320, 32)]
    node = {"_target_": "rft.data.rows.sources.FileRows", "columns": {}, "schema": None}
    for name, texts in {"train": prompts, "heldout": [prompt[::-1] for prompt in prompts]}.items():
        rows = (json.dumps({"prompt": text, "answer": "x"}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    config["data"]["train"] = node | {"path": str(folder / "train.jsonl"), "limit": None}
    config["data"]["eval"] = {"heldout": node | {"path": str(folder / "heldout.jsonl"), "limit": 2}}


def staged(tracker: MemoryTracker, stage: str, function: Callable) -> Callable:
    def watched(*arguments: Any, **options: Any) -> Any:
        with tracker.stage(stage):
            return function(*arguments, **options)

    return watched


def counted(config: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Bytes of each term at the peak of each stage of a run. What a checkpoint serializes is no tensor."""
    tracker = MemoryTracker(FSDP2.memory_labels)
    with pytest.MonkeyPatch.context() as patch, tracker.watch():
        for stage, (owner, name) in STAGES.items():
            patch.setattr(owner, name, staged(tracker, stage, vars(owner)[name]))
        Job(config).fit("")
    return tracker.peaks()


def tensor_bytes(terms: Mapping[str, int]) -> int:
    """Planned bytes of a stage, without what a checkpoint serializes."""
    return sum(terms.values()) - terms[f"file{HOST}"]


def main() -> None:
    torch.set_num_threads(1)
    export.FILE_BYTES = FILE_BYTES
    configs = json.loads(Path(sys.argv[1]).read_text())
    found = {name: counted(config) for name, config in configs.items()}
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    rank = dist.get_rank()
    stop()
    if rank == 0:
        planned = {name: PlanJob(config | {"mode": "plan"}, len(ranks)).forecast() for name, config in configs.items()}
        memory = {name: forecast.memory for name, forecast in planned.items()}
        Path(sys.argv[2]).write_text(json.dumps({"counted": ranks, "planned": memory}))
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may abort the interpreter's teardown, see `leave`


if __name__ == "__main__":
    main()
