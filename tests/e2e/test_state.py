"""A checkpoint saves what a run remembers: the objects of a resumed run hold what those of the whole run held."""

import re
import shutil

import pytest

from rft.setup.assembly import Job
from rft.train.profiler import Profiler
from tests.e2e.test_algorithms import ALGORITHMS
from tests.held import held, lost, of_modules
from tests.helpers import ADAPTIVE, CLOCK, identical, numbers
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")

SAVED, NEXT = 2, 3  # the step of the checkpoint, and the one after it
SIZES = (f"steps={NEXT}", f"checkpoint.every={SAVED}", "checkpoint.keep_last=9", "eval.at_start=false", "eval.every=0")
# What a process holds for itself, each with the reason why a checkpoint does not save it.
CACHES = {
}


def train(config, folder, monkeypatch, copy=None):
    """Trains in a folder; returns what the objects held before each step. Before the last one copies the folder."""
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
            shutil.copytree(folder, copy, symlinks=True)
        return step(profiler, number)

    with monkeypatch.context() as patch:
        patch.setattr(Job, "assemble", assembles)
        patch.setattr(Profiler, "step", steps)
        Job(config | {"output_dir": str(folder)}).fit("")
    return found


def not_restored(overrides, tiny, tmp_path, monkeypatch):
    """The places that a resumed run has not as the whole run had them."""
    config = tiny(*SIZES, *overrides)
    config["algorithm"]["group_size"] = min(config["algorithm"]["group_size"], 4)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    before = train(config, whole, monkeypatch, parts)
    after = train(config, parts, monkeypatch)
    assert list(after) == [NEXT], "it resumes after the checkpoint"
    places = lost(before[1], before[NEXT], after[NEXT])
    return [place for place in places if not any(re.search(pattern, place) for pattern in CACHES)]


def same_end(tmp_path):
    one, other = (state(tmp_path / run) for run in ("whole", "parts"))
    for saved in (one, other):
        saved["numbers"] = {k: v for k, v in saved["numbers"].items() if not k.startswith(CLOCK)}
    return numbers(tmp_path / "whole") == numbers(tmp_path / "parts") and identical(one, other)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_state(name, tiny, tmp_path, monkeypatch):
    over = [f"algorithm={name}", "warmup=none"]
    bad = not_restored(over, tiny, tmp_path, monkeypatch)
    with open("/tmp/lost.txt", "a") as f:
        for p in sorted({re.sub(r"\[\d+\]", "[]", p) for p in bad}): print(name, p, file=f)
    assert same_end(tmp_path)
