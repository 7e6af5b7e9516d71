"""The recipes compose, run from anywhere, and nothing in the package knows them."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import rft
from rft.build import Job
from rft.inference import evaluate
from rft.reward.gsm8k import gold_number, marked_number

ROOT = Path(rft.__file__).parent.parent
RECIPES = ROOT / "recipes"
GSM8K = os.environ.get("RFT_GSM8K_DIR")
STAGES = ("sft", "reward_model", "dpo", "grpo", "evaluate")
needs_data = pytest.mark.skipif(GSM8K is None, reason="RFT_GSM8K_DIR is not set")


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
    assert config["data"]["eval"]["test"]["path"] == "some/folder/test.jsonl"
    Job(config)


def test_every_recipe_is_covered_here():
    assert {str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/*.yaml")} == {
        "own_loss/run.yaml", "gsm8k/run.yaml", "gsm8k/cpu.yaml", *(f"gsm8k/{stage}.yaml" for stage in STAGES)
    }  # fmt: skip


@pytest.fixture
def stage(resolved, monkeypatch, tmp_path):
    """Composes a stage of gsm8k as its command does, in an empty folder."""
    monkeypatch.syspath_prepend(RECIPES / "gsm8k")
    monkeypatch.chdir(tmp_path)
    return lambda name, *overrides: resolved(*overrides, folder=RECIPES / "gsm8k", name=name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reward_model", "after.sft.folder=outputs/mine/sft holds no finished run; make it with `{} sft name=mine`"),
        ("grpo", "after.reward_model.folder=outputs/mine/reward_model holds no finished run; make it with `{} reward"),
        ("evaluate", "after.run.folder=outputs/mine/grpo holds no finished run; make it with `{} grpo name=mine`"),
    ],
)
def test_a_stage_asks_for_the_one_before_it(name, said, stage, monkeypatch, tmp_path):
    monkeypatch.setenv("RFT_GSM8K_DIR", "some/folder")
    config = stage(name, "name=mine")
    if name == "grpo":
        (tmp_path / "outputs/mine/sft").mkdir(parents=True)
        (tmp_path / "outputs/mine/sft/result.json").write_text("{}")
    with pytest.raises(ValueError) as caught:
        evaluate(config, Console(quiet=True)) if name == "evaluate" else Job(config).fit("")
    assert str(caught.value).startswith(said.format("python -m rft.main -cd recipes/gsm8k -cn"))


@needs_data
def test_nothing_is_evaluated_that_a_stage_has_learned_from(stage):
    asked, solved = (
        {row["question"]: row for row in map(json.loads, Path(GSM8K, f"{name}.jsonl").read_text().splitlines())}
        for name in ("test", "model_solutions")
    )
    assert len(solved) == 660 and solved.keys() < asked.keys()
    learned = set()
    for name in ("sft", "reward_model", "dpo", "grpo"):
        job = Job(stage(name))
        rows = job.train.build(key="data.train").load(["prompt"])
        learned |= {row["prompt"] for row in rows}
        if name == "reward_model":
            held_out = job.held_out["heldout"].build(key="data.eval.heldout").load(["chosen", "rejected"])
            apart = [{row["prompt"] for row in part} for part in (rows, held_out)]
            assert not apart[0] & apart[1] and apart[0] | apart[1] < solved.keys()
            assert [len(rows), len(held_out), *map(len, apart)] == [867, 299, 261, 92]
            for row in [*rows, *held_out]:
                gold = gold_number(solved[row["prompt"]]["ground_truth"].replace("\nA: ", "\n#### "))
                assert marked_number(row["chosen"], ["####"]) == gold != marked_number(row["rejected"], ["####"])
        else:
            test = {row["prompt"] for row in job.held_out["test"].build(key="data.eval.test").load(["answer"])}
            assert test == asked.keys() - solved.keys() and len(test) == 659
    assert stage("evaluate")["data"]["eval"] == stage("sft")["data"]["eval"] and not learned & test


@needs_data
@pytest.mark.slow
def test_the_stages_of_gsm8k_on_the_real_problems(stage, tmp_path):
    small = ["steps=1", "batch.prompts=2", "data.train.limit=8"]
    answers = ["data.eval.test.limit=2", "rollout.max_new_tokens=8"]
    Job(stage("sft", *small, *answers)).fit("")
    Job(stage("reward_model", *small, "data.eval.heldout.limit=2")).fit("")
    Job(stage("dpo", *small, *answers)).fit("")
    Job(stage("grpo", *small, *answers, "algorithm.group_size=2")).fit("")
    assert evaluate(stage("evaluate", *answers), Console(quiet=True)) in (0.0, 0.5, 1.0)

    def last(name):
        return json.loads((tmp_path / "outputs/gsm8k" / name / "metrics.jsonl").read_text().splitlines()[-1])

    assert last("dpo")["loss/dpo"] == pytest.approx(math.log(2)), "the reference is the policy at the first step"
    assert 0 < last("reward_model")["loss/bradley_terry"] < 2
    assert last("reward_model")["eval/heldout/accuracy"] in (0.0, 0.5, 1.0)
    terms = {name: last("grpo")[f"reward/{name}"] for name in ("gsm8k", "format", "model")}
    total = terms["gsm8k"] + 0.1 * terms["format"] + 0.2 * terms["model"]
    assert last("grpo")["reward/mean"] == pytest.approx(total, abs=1e-5) and terms["model"] != 0
    told = json.loads((tmp_path / "outputs/gsm8k/grpo/evaluation.json").read_text())
    assert "outputs/gsm8k/grpo/checkpoints" in told["model"]


@needs_data
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
