"""A run that a signal or the time limit stops ends with a checkpoint, and the same command continues it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rft
from rft.errors import Stopped
from rft.setup.assembly import Job
from rft.train.folder.run_lock import RunLock
from rft.train.stop import STOPPED
from rft.train.trainer import Trainer
from tests.conftest import ENDS_S
from tests.helpers import CLOCK, identical, numbers
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = ("steps=60", "eval.every=7", "batch.minibatches=2", "strategy.device=cpu")
LAST = 62  # with the warm-up
# A script that runs in the background ignores SIGINT, one of nohup SIGHUP, and so would their processes.
HEARING = (
    "import os, signal, sys\n"
    "for number in (signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_DFL)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@pytest.fixture
def launch(sized, tmp_path):
    """Starts the main program in `tmp_path`; kills it at the end of the test."""
    processes = []

    def start(*overrides, ranks=0):
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
        command = [sys.executable, "-m", *torchrun, "rft.main", "output_dir=run", *sized(*STEPS, *overrides)]
        environment = os.environ | {"PYTHONPATH": str(Path(rft.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
        with (tmp_path / "log").open("a") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", HEARING, *command], cwd=tmp_path, env=environment, stdout=log, stderr=log
                )
            )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def last_step(run):
    """The last step that a run has logged."""
    return numbers(run)[-1]["step"] if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text() else 0


def wait_for(run, step, process):
    """Waits until a run has logged a step."""
    deadline = time.monotonic() + 120
    while last_step(run) < step:
        assert process.poll() is None and time.monotonic() < deadline, (run.parent / "log").read_text()
        time.sleep(0.05)


def saved_step(run):
    return int(os.readlink(run / "checkpoints" / "latest").removeprefix("step_"))


def without_clock(run):
    saved = state(run)
    saved["numbers"] = {key: value for key, value in saved["numbers"].items() if not key.startswith(CLOCK)}
    return saved


SAVED = ("steps=3", "checkpoint.every=1", "checkpoint.keep_last=99")


@pytest.fixture(scope="module")
def finished(resolved, sized, tmp_path_factory):
    """The folder of a run that nothing stopped, and the metric that it returned."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, Job(resolved(*sized(*SAVED, f"output_dir={folder}"))).fit("")


@pytest.mark.parametrize(
    ("step", "number"), [(2, signal.SIGTERM), pytest.param(4, signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_in_a_step_stops_the_run_after_it(step, number, finished, tiny, tmp_path, monkeypatch, capsys):
    """Step 2 is the last of the warm-up."""
    (whole, returned), parts, update = finished, tiny(*SAVED), Trainer.update
    stopped = tmp_path / "run" / STOPPED

    def interrupted(trainer, *arguments):
        if trainer.step == step:
            os.kill(os.getpid(), number)
        update(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", interrupted)
        before = signal.signal(number, signal.default_int_handler)  # a job in the background ignores SIGINT
        with pytest.raises(
            Stopped, match=rf"^stopped by {number.name} after step {step}, .*the same command continues"
        ):
            Job(parts).fit("")
        signal.signal(number, before)
    assert saved_step(tmp_path / "run") == last_step(tmp_path / "run") == step
    assert (tmp_path / "run" / "report.html").exists() and not (tmp_path / "run" / "result.json").exists()
    assert json.loads(stopped.read_text()) == {"step": step, "cause": number.name}
    capsys.readouterr()
    assert Job(parts).fit("") == returned and not stopped.exists()
    said = " ".join(capsys.readouterr().out.split())
    assert f"continues from step {step} of 5 in {tmp_path}/run/checkpoints/step_{step:08d} (of 20" in said
    assert "ranks:" not in said
    assert numbers(tmp_path / "run") == numbers(whole)
    assert identical(without_clock(tmp_path / "run"), without_clock(whole))


@pytest.mark.slow
def test_a_run_stopped_five_times_ends_as_the_whole_run(launch, tiny, tmp_path):
    run, steps = tmp_path / "run", []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        process = launch()
        wait_for(run, (steps or [0])[-1] + 2, process)
        process.send_signal(number)
        assert process.wait(timeout=ENDS_S) == 75, (tmp_path / "log").read_text()
        steps.append(saved_step(run))
        assert last_step(run) == steps[-1] < LAST
        assert f"stopped by {number.name} after step {steps[-1]}, with" in (tmp_path / "log").read_text()
    with RunLock() as lock:
        lock.take(run)
        assert launch().wait(timeout=ENDS_S) == 1
        assert f"run is in use by process {os.getpid()} on " in (tmp_path / "log").read_text()
    assert launch("max_time=1s").wait(timeout=ENDS_S) == 75, "which is over after a few steps"
    assert steps[-1] < saved_step(run) < LAST and "stopped by max_time=1s after" in (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert not (run / "result.json").exists()
    assert launch().wait(timeout=ENDS_S) == 0
    assert (run / "result.json").exists() and not (tmp_path / "run-2").exists()
    whole = tiny(*STEPS)
    whole["output_dir"] = str(tmp_path / "whole")
    Job(whole).fit("")
    assert numbers(run) == numbers(tmp_path / "whole")
    assert identical(without_clock(run), without_clock(tmp_path / "whole"))


@pytest.mark.slow
def test_the_time_limit_stops_a_sweep_too(launch, tmp_path):
    process = launch("-m", "seed=0,1", "max_time=1s")
    assert process.wait(timeout=ENDS_S) == 75, (tmp_path / "log").read_text()
    assert len(list(tmp_path.glob("run*"))) == 1 and "stopped by max_time=1s" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_step(launch, tmp_path):
    run = tmp_path / "run"
    process = launch(ranks=2)
    wait_for(run, 2, process)
    os.kill(ranks_of(process.pid)[1], signal.SIGUSR1)
    assert process.wait(timeout=ENDS_S) == 0, (tmp_path / "log").read_text()
    first = saved_step(run)
    assert "stopped by a signal to another rank after" in (tmp_path / "log").read_text()
    process = launch(ranks=2)
    wait_for(run, first + 2, process)
    process.send_signal(signal.SIGTERM)  # torchrun passes it to its ranks, and ends with an error of its own
    assert process.wait(timeout=ENDS_S) == 1
    assert json.loads((run / STOPPED).read_text()) == {"step": saved_step(run), "cause": "SIGTERM"}
    assert last_step(run) == saved_step(run) >= first + 2
    assert f"stopped by SIGTERM after step {saved_step(run)}," in (tmp_path / "log").read_text()
    assert not (run / "result.json").exists()


def ranks_of(parent):
    """The process ids of the ranks of torchrun, by rank."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        if f"\nPPid:\t{parent}\n" in status.read_text():
            words = (status.parent / "environ").read_text().split("\0")
            found |= {int(word[5:]): int(status.parent.name) for word in words if word.startswith("RANK=")}
    return found


def test_more_steps_of_a_finished_run_are_the_longer_run(finished, tiny, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run", symlinks=True)
    longer = tiny(*SAVED, "steps=4")
    assert Job(longer).fit("") == Job(longer | {"output_dir": str(tmp_path / "whole")}).fit("")
    assert not (tmp_path / "run-2").exists()
    one, other = ([row for row in numbers(tmp_path / name) if row["step"] == 6] for name in ("run", "whole"))
    assert one == other and len(one) == 1
    assert identical(without_clock(tmp_path / "run"), without_clock(tmp_path / "whole"))
    assert json.loads((tmp_path / "run" / "result.json").read_text()).keys() >= {"eval/heldout/accuracy"}


def test_a_fork_and_a_path_start_from_a_checkpoint(finished, tiny, tmp_path):
    run = shutil.copytree(finished[0], tmp_path / "run", symlinks=True)
    Job(tiny(*SAVED, "resume=fork", "steps=4", "actor.optimizer.lr=1e-3", "algorithm/loss=gspo")).fit("")
    assert [row["step"] for row in numbers(tmp_path / "run-2")] == [6]
    third = tiny("steps=3", f"resume={run}/checkpoints/step_00000003")
    third["output_dir"] = str(tmp_path / "other")
    Job(third).fit("")
    assert numbers(tmp_path / "other") == numbers(run)[4:]
    assert identical(without_clock(tmp_path / "other"), without_clock(run))
