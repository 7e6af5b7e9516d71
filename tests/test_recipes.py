"""The recipes compose, run from anywhere, and nothing in the package knows them."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rft
from rft.build import Job

ROOT = Path(rft.__file__).parent.parent
RECIPES = ROOT / "recipes"
GSM8K = os.environ.get("RFT_GSM8K_DIR")


def run(recipe, name, *overrides, cwd):
    """The main program in a process of its own, in an empty folder."""
    command = [sys.executable, "-m", "rft.main", "-cd", str(RECIPES / recipe), "-cn", name, *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    return [json.loads(line) for path in cwd.glob("outputs/*/metrics.jsonl") for line in path.open()]


def test_a_loss_and_a_reward_of_ones_own(tmp_path):
    rows = run("own_loss", "run", "steps=2", "warmup.steps=5", "warmup.rows=16", "data.train.count=64",
               "data.eval.heldout.count=8", "batch.prompts=4", "reward.terms.digits_right.weight=1.0",
               "algorithm.loss.leak=0.3", cwd=tmp_path)  # fmt: skip
    assert [row["step"] for row in rows] == list(range(8))
    last = rows[-1]
    assert {"loss/leaky_clip", "clip/leaky", "reward/digits_right", "reward/exact_match"} <= set(last)
    assert last["reward/mean"] == pytest.approx(last["reward/digits_right"] + last["reward/exact_match"])
    assert last["grad_norm"] > 0
    [folder] = (tmp_path / "outputs").iterdir()
    assert folder.name == "own_loss-seed0" and (folder / "report.html").exists()
    assert "leak: 0.3" in (folder / "config.yaml").read_text()


def test_the_package_knows_no_recipe():
    names = {path.stem for path in RECIPES.rglob("*.py")} | {"own_loss", "digits_right"}
    assert "leaky_clip" in names
    for path in [*(ROOT / "rft").rglob("*.py"), *(ROOT / "rft").rglob("*.yaml")]:
        assert not [name for name in names if name in path.read_text()], path


@pytest.mark.parametrize("overrides", [[], ["algorithm=gspo"]])
def test_gsm8k_for_a_gpu_composes(overrides, resolved):
    config = resolved(*overrides, folder=RECIPES / "gsm8k", name="run")
    assert config["actor"]["path"] == config["actor"]["tokenizer"]["path"] == "Qwen/Qwen2.5-0.5B-Instruct"
    assert config["warmup"] is None
    Job(config)


@pytest.mark.parametrize("overrides", [[], ["algorithm=gspo"]])
def test_gsm8k_for_a_cpu_composes(overrides, resolved, monkeypatch):
    monkeypatch.setenv("RFT_GSM8K_DIR", "some/folder")
    config = resolved(*overrides, folder=RECIPES / "gsm8k", name="cpu")
    assert config["actor"]["tokenizer"]["files"] == ["some/folder/train.jsonl"]
    assert config["reference"]["model_config"] == config["actor"]["model_config"]
    Job(config)


def test_every_recipe_is_covered_here():
    assert {str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/*.yaml")} == {
        "own_loss/run.yaml", "gsm8k/run.yaml", "gsm8k/cpu.yaml"
    }  # fmt: skip


@pytest.mark.skipif(GSM8K is None, reason="RFT_GSM8K_DIR is not set")
def test_gsm8k_on_the_real_problems(resolved, tmp_path):
    overrides = ["warmup.steps=2", "warmup.rows=4", "steps=1", "batch.prompts=2", "algorithm.group_size=2",
                 "data.train.limit=64", "data.eval.test.limit=4", "rollout.max_new_tokens=8"]  # fmt: skip
    config = resolved(*overrides, f"output_dir={tmp_path / 'run'}", folder=RECIPES / "gsm8k", name="cpu")
    Job(config).fit("")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [(row["step"], row["stage"]) for row in rows] == [(0, "warmup"), (1, "warmup"), (2, "warmup"), (3, "train")]
    for name in ("eval/test/accuracy", "eval/test/format", "eval/test/accuracy_stderr", "eval/test/format_stderr"):
        assert 0 <= rows[-1][name] <= 1
    assert rows[1]["loss/nll"] == pytest.approx(math.log(2048), abs=0.2), "a new model finds every token as likely"
    texts = [json.loads(line) for line in (tmp_path / "run" / "trajectories" / "step_00000003.jsonl").open()]
    prompts = {json.loads(line)["question"] for line in Path(GSM8K, "test.jsonl").read_text().splitlines()}
    assert {row["prompt"] for row in texts if row["set"] == "eval/test"} <= prompts
    assert not {row["prompt"] for row in texts if row["set"] == "train"} & prompts
