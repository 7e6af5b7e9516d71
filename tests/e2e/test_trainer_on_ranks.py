"""Two processes do what one does, on every kind of source; the main program under torchrun does too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rft
from rft.setup.assembly import Job
from tests.conftest import ENDS_S
from tests.helpers import Interrupted, interrupt, numbers
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def launch(sized, tmp_path_factory):
    """Runs the main program on two processes; returns the run folder."""

    def run(*overrides, folder=None):
        folder = folder or tmp_path_factory.mktemp("ranks") / "run"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "rft.main", *sized(f"output_dir={folder}", "strategy.device=cpu", *overrides)]
        environment = os.environ | {"PYTHONPATH": str(Path(rft.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
        found = subprocess.run(
            command, env=environment, cwd=folder.parent, capture_output=True, text=True, timeout=ENDS_S
        )
        assert found.returncode == 0, found.stdout + found.stderr
        return folder

    return run


def config_of(tiny, folder, *overrides):
    return tiny("strategy.device=cpu", *overrides) | {"output_dir": str(folder)}


def alone(tiny, folder, *overrides):
    Job(config_of(tiny, folder, *overrides)).fit("")
    return folder


@pytest.fixture
def on_two_ranks(tiny, torchrun, tmp_path):
    """Runs a config on two ranks; returns the run folder."""

    def run(*overrides):
        folder, file = tmp_path / "two", tmp_path / "configs.json"
        file.write_text(json.dumps([config_of(tiny, folder, *overrides)]))
        torchrun(Path(__file__).parent / "runs_on_ranks.py", file)
        return folder

    return run


@pytest.mark.slow
def test_two_processes_have_the_same_supervised_losses_as_one(tiny, launch, tmp_path):
    given = ("algorithm=sft", "steps=20", "batch.prompts=6", "data.train.length=[2,6]", "actor.micro_batch_tokens=48",
             "actor.optimizer.lr=1e-2", "actor.optimizer.max_grad_norm=1.0")  # fmt: skip
    one, two = numbers(alone(tiny, tmp_path / "one", *given)), numbers(launch(*given))
    for name in ("loss/nll", "grad_norm", "length/mean", "eval/heldout/accuracy"):
        expected = [row[name] for row in one if name in row]
        assert [row[name] for row in two if name in row] == pytest.approx(expected, rel=1e-5), name
    assert one[1]["loss/nll"] - one[-1]["loss/nll"] > 0.5, "it did learn something"


def sampled(run, step):
    """Every response to every prompt of a step, with its score."""
    rows = [json.loads(line) for line in (run / "trajectories" / f"step_{step:08d}.jsonl").open()]
    return {(row["prompt"], row["response"], row["score"]) for row in rows if row["set"] == "train"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("algorithm=dapo",),
        ("algorithm=ppo", "algorithm/terms=[kl]"),
        ("algorithm=kl_cov", "algorithm/gradient_mask=high_entropy", "algorithm/correction=geo_rs_token_tis"),
        ("algorithm=prime", "algorithm/correction=k3_rs", "algorithm.correction.anchor=rollout"),
        ("algorithm=spo", "algorithm.group_size=1", "batch.prompts=8"),
        ("algorithm=gvpo",),
        ("algorithm=pf_ppo",),
        ("environment=marked_calculator", "data=products", 'actor.tokenizer.alphabet="0123456789*=?"'),
        ("algorithm=rloo", "algorithm/shaping=[cosine_length,kimi_length,running_norm]", "algorithm.advantage_clip=1"),
    ],
)
def test_two_processes_sample_what_one_samples(overrides, tiny, on_two_ranks, tmp_path):
    given = ("steps=3", "warmup=none", "trajectories.every=1", "batch.minibatches=2", *overrides)
    one, two = alone(tiny, tmp_path / "one", *given), on_two_ranks(*given)
    theirs, ours = numbers(one), numbers(two)
    assert [row["step"] for row in ours] == [0, 1, 2, 3]
    assert ours[1].keys() == theirs[1].keys()
    varies = ("balance/", "padding/waste", "rollout/", "episode/environment_s")  # depends on who computes what
    for name in (name for name in theirs[1] if not name.startswith(("stage", *varies))):
        assert ours[1][name] == pytest.approx(theirs[1][name], rel=1e-4, abs=1e-6), name
    assert sampled(two, 1) < sampled(one, 1), "rank zero shows its share"
    assert all(row["grad_norm"] > 0 for row in ours[1:])


@pytest.mark.slow
def test_two_processes_go_on_from_the_checkpoint_of_one(tiny, launch, tmp_path, monkeypatch):
    given = ("algorithm=dapo", "algorithm.source.redraw.max_rounds=6", "steps=4", "checkpoint.every=1")
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(Interrupted):
            alone(tiny, tmp_path / "run", *given)
    assert state(tmp_path / "run")["step"] == 4
    whole = numbers(alone(tiny, tmp_path / "whole", *given))
    launch(*given, folder=tmp_path / "run")
    assert (tmp_path / "run" / "result.json").exists() and not (tmp_path / "run-2").exists()
    rows = numbers(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert rows[:5] == whole[:5]
    for name in ("reward/mean", "length/mean", "grad_norm", "entropy", "rollout/rounds"):
        assert rows[5][name] == pytest.approx(whole[5][name], rel=1e-4), name
