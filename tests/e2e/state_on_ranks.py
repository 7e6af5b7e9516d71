"""What a resumed run does not hold as the whole run held it, on any number of ranks.

torchrun --nproc-per-node 2 state_on_ranks.py config.json folder
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rft.distributed import leave
from rft.setup.assembly import Job
from rft.train.observation import Profiler
from tests.e2e.object_digests import held, lost, of_modules

NEXT = 3  # the last step, behind the one that the checkpoint holds
SIZES = (f"checkpoint.every={NEXT - 1}", "checkpoint.keep_last=9", "eval.at_start=false", "eval.every=0")
# What each process holds for itself, and why a checkpoint does not save it.
EXCEPT = {
    r"\.world\.wait\.": "the collectives of this process",
    r"^trainer\.output\.checkpoints\._(group|writing|written|writer)$": "the checkpoints that this process writes",
    r"^trainer\.output\.log\.console\._stage\.": "the progress bar of this process",
    r"^trainer\.numbers\['time/checkpoint_wait_s'\]$": "there if a checkpoint was still being written",
    r"^trainer\.warns_of_gap$": "each process warns once",
    r"^trainer\.evaluated$": "only read in the step that sets it",
    r"^trainer\.(stage|phase)$": "set in every step",
    r"\.cost(\[\d\])?$": "computed from the config of the model",
    r"row_sampler(\._parts\[\d\])?\._(epoch|order|round|turns)\b": "computed from the seed and the position",
    r"\.rows(\.parts\['\w'\])?\.drawn\b": "the rows of the last step of a stream",
}


def train(config, folder, monkeypatch, copy=None):
    """Trains in a folder; returns what the objects held before the first and the last step.

    Args:
        copy: gets the folder as it is before the last step.
    """
    found, made = {}, {}
    assemble, step = Job.assemble, Profiler.step

    def assembles(job, *args, **options):
        made["trainer"], made["stages"] = assemble(job, *args, **options)
        return made["trainer"], made["stages"]

    def steps(profiler, number):
        if number in (1, NEXT):
            found[number] = held(made | of_modules())
        if number == NEXT and copy is not None:
            assert made["trainer"].checkpoints.wait()
            made["trainer"].world.decide(lambda: shutil.copytree(folder, copy, symlinks=True))
        return step(profiler, number)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "assemble", assembles)
        patch.setattr(Profiler, "step", steps)
        Job(config | {"output_dir": str(folder)}).fit("")
    return found


def not_restored(config, folder, monkeypatch):
    """The places where this rank of a resumed run does not hold what it held in the whole run, before the last step.

    Args:
        folder: gets the folders of the whole run and of the resumed one.
    """
    before = train(config, folder / "whole", monkeypatch, folder / "parts")
    after = train(config, folder / "parts", monkeypatch)
    assert list(after) == [NEXT], "it resumes after the checkpoint"
    return lost(before[1], before[NEXT], after[NEXT])


def excepted(place):
    """Whether no checkpoint has to save what lies there."""
    return any(re.search(pattern, place) for pattern in EXCEPT)


def main() -> None:
    torch.set_num_threads(1)
    config, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    places = not_restored(config, folder, pytest.MonkeyPatch())
    (folder / f"places_{dist.get_rank()}.json").write_text(json.dumps(places))
    leave()


if __name__ == "__main__":
    main()
