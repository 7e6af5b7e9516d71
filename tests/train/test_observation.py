"""Profiles of single steps: what lands in the run folder, which steps are refused, and that nothing else changes."""

import gzip
import json
import re

import pytest
import torch

from rft.distributed import start
from rft.logger.log import RunLog, SilentLog
from rft.setup.assembly import Job
from rft.train.observation import Profiler
from rft.train.trainer import Trainer

STAGES = {"rollout", "reward", "annotate", "update", "refresh"}
CLOCK = ("time/", "throughput/", "memory/")


def files(run):
    return sorted(path.name for path in run.glob("profile/*"))


def trace(run, step, rank=0):
    with gzip.open(run / "profile" / f"step_{step:08d}_rank_{rank}.json.gz", "rt") as file:
        return json.load(file)["traceEvents"]


def named(*steps):
    return [f"step_{step:08d}_rank_0.{ending}" for step in steps for ending in ("json.gz", "txt")]


def numbers(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]


@pytest.mark.slow
def test_the_steps_that_are_named_leave_a_trace_and_a_table_and_nothing_else_changes(tiny, tmp_path, capsys):
    run, plain = tmp_path / "run", tmp_path / "plain"
    short = ("warmup.steps=1", "steps=2")
    Job(tiny(*short, "profile.steps=[1,3]")).fit("")  # a step of warm-up before the reinforcement
    said = re.sub(r"\s", "", capsys.readouterr().out)
    assert files(run) == named(1, 3)
    labels = [[event["name"] for event in trace(run, step) if event.get("cat") == "user_annotation"] for step in (1, 3)]
    assert STAGES & set(labels[0]) == {"annotate", "update"}, "the warm-up samples nothing"
    assert set(labels[1]) >= STAGES
    assert [name for name in labels[1] if name in ("rollout", "update", "refresh")] == ["rollout", "update", "refresh"]
    for step in (1, 3):
        path = run / "profile" / f"step_{step:08d}_rank_0.txt"
        assert re.search(r"aten::(add)?mm\b", path.read_text())
        assert f"profileofstep{step}:{path}" in said
    shares = [float(share) for share in re.findall(r"([\d.]+)%\s+\S+\s+[\d.]+%", path.read_text())]
    assert len(shares) > 10
    assert shares == sorted(shares, reverse=True), "the slowest come first"

    Job(tiny(*short, f"output_dir={plain}")).fit("")
    assert not (plain / "profile").exists()
    assert numbers(plain) == numbers(run)


def test_every_rank_writes_its_own(tmp_path):
    world = start("cpu")
    world.rank = 1
    profiler = Profiler([7], tmp_path, world, SilentLog())
    for step in (6, 7):
        with profiler.step(step):
            world.all_sum(torch.ones(2))
    assert files(tmp_path) == ["step_00000007_rank_1.json.gz", "step_00000007_rank_1.txt"]
    assert any("allreduce" in event["name"] for event in trace(tmp_path, 7, rank=1))


@pytest.mark.parametrize(
    ("given", "steps", "last"),
    [("[3,6]", r"\[6\]", 5), ("[8,1,9]", r"\[8, 9\]", 5)],
)
def test_steps_that_cannot_come_are_refused(given, steps, last, tiny):
    with pytest.raises(ValueError, match=rf"profile\.steps={steps}: the steps of this run are 1 to {last}"):
        Job(tiny(f"profile.steps={given}"))


def test_a_step_before_the_first_is_refused(tiny):
    with pytest.raises(ValueError, match=r"^profile\.steps\[1\]=0: it must be at least 1$"):
        Job(tiny("profile.steps=[3,0]"))


def test_without_a_warm_up_there_are_fewer(tiny):
    Job(tiny("profile.steps=[3]", "warmup=none"))
    with pytest.raises(ValueError, match="1 to 3"):
        Job(tiny("profile.steps=[4]", "warmup=none"))


def test_a_run_says_which_steps_did_not_come(tiny, tmp_path, capsys):
    Job(tiny("profile.steps=[5]", "warmup.eval_every=1", "warmup.stop_at=0.0")).fit("")
    assert files(tmp_path / "run") == []
    assert "profile.steps=[5] were not reached" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_its_profile(tiny, tmp_path, monkeypatch):
    config, whole = tiny("profile.steps=[2,4]", "checkpoint.every=1"), Trainer.check_weights

    def failing(trainer, *arguments):
        if trainer.step == 4:
            raise KeyboardInterrupt
        whole(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "check_weights", failing)
        with pytest.raises(KeyboardInterrupt):
            Job(config).fit("")
    run = tmp_path / "run"
    assert files(run) == named(2)
    first = (run / "profile" / "step_00000002_rank_0.txt").stat().st_mtime_ns
    Job(config).fit("")
    assert files(run) == named(2, 4)
    assert (run / "profile" / "step_00000002_rank_0.txt").stat().st_mtime_ns == first, "step 2 was not run again"
    assert [row["step"] for row in numbers(run)] == [0, 1, 2, 3, 4, 5]
    assert "update" in {event["name"] for event in trace(run, 4)}


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "profile").write_text("no folder")
    with RunLog(tmp_path, {}) as log, Profiler([1], tmp_path, start("cpu"), log).step(1):
        pass
    assert (
        (tmp_path / "warnings.txt").read_text().startswith("profile.steps=[1] failed; training does not depend on it: ")
    )
