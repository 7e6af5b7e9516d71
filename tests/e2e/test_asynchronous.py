"""Runs that sample while they train."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import rft
from rft.setup.assembly import Job
from tests.conftest import ENDS_S

SCRIPT = Path(__file__).parent / "asynchronous_kills.py"

ENGINES = "tests.e2e.older_weights"
AHEAD = (
    "warmup=none", "steps=5", "batch.prompts=4", "eval.every=0", "eval.at_start=false",
    "algorithm.old_logprobs=rollout", "rollout.staleness=1",
)  # fmt: skip


def steps(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [row for row in rows if row["stage"] == "train" and row["step"] > 0]


def weights(folder):
    [file] = folder.glob("checkpoints/step_*/actor/model.safetensors")
    return load_file(file)


def test_one_step_off_equals_a_plain_loop_with_the_weights_of_the_step_before(tiny, tmp_path):
    found = {}
    for engine, changes in (("Oldest", ()), ("OneStepOff", ("rollout.staleness=0",))):
        config = tiny(*AHEAD, f"rollout.engine._target_={ENGINES}.{engine}", *changes)
        Job(config).fit("")
        found[engine] = (steps(tmp_path / "run"), weights(tmp_path / "run"))
        (tmp_path / "run").rename(tmp_path / engine)
    (ahead, after), (loop, expected) = found["Oldest"], found["OneStepOff"]
    assert [row["staleness/mean"] for row in ahead] == [0, 1, 1, 1, 1] == [row["staleness/mean"] for row in loop]
    for name in ("reward/mean", "length/mean", "rollout/logprob_gap_max", "grad_norm"):
        assert [row[name] for row in ahead] == [row[name] for row in loop]
    assert after.keys() == expected.keys() and all(after[name].equal(expected[name]) for name in after)


@pytest.mark.slow
def test_two_ranks_sample_ahead_as_one_does(tiny, torchrun, one_thread, tmp_path):
    config = tiny(*AHEAD, f"rollout.engine._target_={ENGINES}.Oldest", "strategy.device=cpu")
    redrawn = tiny(
        *AHEAD, "algorithm=dapo", "algorithm.source.redraw.max_rounds=4", "rollout.staleness=2",
        f"rollout.engine._target_={ENGINES}.Newest", "strategy.device=cpu",
    )  # fmt: skip
    Job(config | {"output_dir": str(tmp_path / "one")}).fit("")
    on_ranks = [config | {"output_dir": str(tmp_path / "two")}, redrawn | {"output_dir": str(tmp_path / "redrawn")}]
    (tmp_path / "configs.json").write_text(json.dumps(on_ranks))
    torchrun(SCRIPT.with_name("runs_on_ranks.py"), tmp_path / "configs.json")
    one, two = steps(tmp_path / "one"), steps(tmp_path / "two")
    for name in ("staleness/mean", "reward/mean", "length/mean", "rollout/logprob_gap", "grad_norm"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=1e-4, abs=1e-9), name
    expected, found = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-6
    rows = steps(tmp_path / "redrawn")
    assert len(rows) == 5 and all(row["staleness/max"] <= 2 for row in rows)


def test_a_run_evaluates_on_the_same_engine_with_the_weights_of_its_step(tiny, tmp_path):
    config = tiny(
        *AHEAD, "rollout.staleness=2", "eval.every=1", "eval.at_start=true",
        f"rollout.engine._target_={ENGINES}.Newest",
    )  # fmt: skip
    Job(config).fit("")
    rows = steps(tmp_path / "run")
    assert len(rows) == 5 and all("eval/heldout/accuracy" in row for row in rows)
    assert all(0 <= row["staleness/max"] <= 2 for row in rows)
    for row in rows:
        assert sum(row[f"staleness/age_{age}"] for age in range(3)) == pytest.approx(1)
        assert all((f"rollout/ess_age_{age}" in row) == (row[f"staleness/age_{age}"] > 0) for age in range(3))


def test_a_run_that_was_stopped_goes_on_with_what_was_sampled(tiny, tmp_path):
    engine = f"rollout.engine._target_={ENGINES}.Newest"
    Job(tiny(*AHEAD, engine, "steps=3", "checkpoint.every=1")).fit("")
    Job(tiny(*AHEAD, engine, "steps=6", "checkpoint.every=1")).fit("")
    rows = steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout=hf",), r"rollout.staleness=1: HFEngine does not sample while the run trains"),
        (("algorithm.old_logprobs=actor",), r"rollout.staleness=1: algorithm.old_logprobs=actor and no correction"),
        (("algorithm/source=prioritized",), r"rollout.staleness=1: CurriculumSource draws its prompts step by step"),
        (("environment=guessing",), r"rollout.staleness=1: episodes of environments do not outlive a step"),
    ],
)
def test_what_does_not_sample_ahead_is_refused_by_name(tiny, overrides, message):
    engine = () if "rollout=hf" in overrides else (f"rollout.engine._target_={ENGINES}.Newest",)
    with pytest.raises(ValueError, match=message):
        Job(tiny(*AHEAD, *engine, *overrides)).fit("")


@pytest.mark.parametrize("option", ["in_flight=3", "while_updating=abort"])
def test_an_option_of_asynchronous_runs_is_not_read_by_others(tiny, option):
    with pytest.raises(ValueError, match=rf"rollout.{option.split('=')[0]}: this run does not read it"):
        Job(tiny(f"rollout.{option}"), typed={f"rollout.{option.split('=')[0]}": ""}).fit("")


@pytest.mark.slow
def test_kills_at_random_moments_lose_and_double_no_prompt(sized, resolved, tmp_path):
    """RFT_RANDOM_KILLS=40 makes 40 of them."""
    run = ("output_dir=run", *AHEAD, "rollout.staleness=2", "steps=8", "checkpoint.every=1", "checkpoint.keep_last=1")
    config = resolved(*sized(*run, f"rollout.engine._target_={ENGINES}.Recorded", "strategy.device=cpu"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = os.environ | {"PYTHONPATH": str(Path(rft.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), os.environ.get("RFT_RANDOM_KILLS", "8")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=ENDS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "outcomes.json").read_text())
    for one in found["runs"]:
        assert one["ledger"] == {"train": {"trained": [[0, 31]]}}, "every prompt trains once"
        rows = [row for row in one["numbers"] if row["stage"] == "train" and row["step"] > 0]
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert max(row["staleness/max"] for row in rows) <= 2
    assert len({kill["step"] for kill in found["kills"]}) > 1, "kills in some steps"
    assert any(kill["held"] for kill in found["kills"]), "checkpoints with groups"
    for kill in found["kills"]:
        assert not set(kill["held"]) & set(kill["after"]), "a group of a checkpoint is not sampled again"
