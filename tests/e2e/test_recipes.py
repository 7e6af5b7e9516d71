"""The recipes compose, run from anywhere, and nothing in the package knows them."""

import json
import math
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import rft
from rft.main import main
from rft.modes.evaluate import evaluate
from rft.reward.rules.gsm8k import gold_number, marked_number
from rft.setup.assembly import Job
from tests.e2e.test_recipes_agents import AGENTS
from tests.e2e.test_recipes_media import WITH_MEDIA
from tests.e2e.test_recipes_smollm2 import RUNS as SMOLLM2

ROOT = Path(rft.__file__).parent.parent
RECIPES = ROOT / "recipes"
GSM8K = os.environ.get("RFT_GSM8K_DIR")
STAGES = ("sft", "from_sft", "reward_model", "dpo", "grpo", "evaluate")
needs_data = pytest.mark.skipif(GSM8K is None, reason="RFT_GSM8K_DIR is not set")


def test_a_loss_and_a_reward_of_ones_own(tmp_path, monkeypatch, plugins_forgotten):
    """The main program in this process, in an empty folder; .ci/run runs the command in a process of its own."""
    sizes = ["steps=2", "warmup.steps=5", "warmup.rows=16", "data.train.count=64", "data.eval.heldout.count=8",
             "batch.prompts=4", "reward.terms.digits_right.weight=1.0", "algorithm.loss.leak=0.3"]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rft", "-cd", str(RECIPES / "own_loss"), "-cn", "run", *sizes])
    main()
    rows = [json.loads(line) for path in tmp_path.glob("outputs/*/metrics.jsonl") for line in path.open()]
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
    """Here, or in the file of recipes with media, of those with episodes, or of SmolLM2."""
    assert {str(path.relative_to(RECIPES)) for path in RECIPES.glob("*/*.yaml")} == {
        "own_loss/run.yaml", "gsm8k/run.yaml", "gsm8k/cpu.yaml", *(f"gsm8k/{stage}.yaml" for stage in STAGES),
        *(f"{recipe}/{name}.yaml" for recipe, names in {**WITH_MEDIA, **AGENTS}.items() for name in names),
        *(f"smollm2/{name}.yaml" for name in SMOLLM2),
    }  # fmt: skip


@pytest.fixture
def stage(resolved, monkeypatch, tmp_path, plugins_forgotten):
    """Composes a stage of gsm8k as its command does, in an empty folder."""
    monkeypatch.syspath_prepend(RECIPES / "gsm8k")
    monkeypatch.chdir(tmp_path)
    return lambda name, *overrides: resolved(*overrides, folder=RECIPES / "gsm8k", name=name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "reward_model",
            "depends_on.sft.folder=outputs/mine/sft holds no finished run; make it with `{} sft name=mine`",
        ),
        (
            "grpo",
            "depends_on.reward_model.folder=outputs/mine/reward_model holds no finished run; make it with `{} reward",
        ),
        ("evaluate", "depends_on.run.folder=outputs/mine/grpo holds no finished run; make it with `{} grpo name=mine`"),
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


def learning() -> dict[str, list[str]]:
    """What follows `-cd recipes/gsm8k` in the commands of the recipe's table, by algorithm."""
    rows = re.findall(r"^\| `(\w+)` \| `(-cn [^`]+)` \|", (RECIPES / "gsm8k/README.md").read_text(), re.MULTILINE)
    return {name: words.split()[1:] for name, words in rows}


def option(group, name):
    return yaml.load((ROOT / f"rft/config/{group}/{name}.yaml").read_text(), yaml.CSafeLoader)


@cache
def made_of(algorithm):
    """The options and numbers of an algorithm's yaml."""
    body = option("algorithm", algorithm)
    found = {}
    for entry in body.pop("defaults"):
        if isinstance(entry, dict):
            found |= {key.removeprefix("override "): option for key, option in entry.items()}
        elif entry != "_self_":
            found |= made_of(entry)
    return found | body


def test_every_algorithm_that_learns_from_data_has_a_command():
    """From given texts, from its own answers as if they were given, or from a teacher."""
    expected = set()
    for path in (ROOT / "rft/config/algorithm").glob("[!_]*.yaml"):
        facts = made_of(path.stem)
        source = option("algorithm/source", facts["source"])["_target_"]
        learns = facts["pick"] in ("best", "best_and_worst") or facts["iteration"] or facts["advantage"] == "teacher"
        if learns or source.rsplit(".")[-1] not in ("RolloutSource", "CurriculumSource"):
            expected.add(path.stem)
    assert learning().keys() == expected and len(expected) >= 21


@needs_data
@pytest.mark.slow
def test_nothing_is_evaluated_that_was_learned_from(stage):
    asked, solved = (
        {row["question"]: row for row in map(json.loads, Path(GSM8K, f"{name}.jsonl").read_text().splitlines())}
        for name in ("test", "model_solutions")
    )
    assert len(solved) == 660 and solved.keys() < asked.keys()
    known, seen, sizes = {}, set(), {}

    def load(target, fields):
        key = json.dumps([target.options, sorted(fields)], default=str)
        if key not in known:
            known[key] = target.build(key=target.key).load(sorted(fields))
        return known[key]

    for name, words in {**learning(), "grpo": ["grpo"]}.items():
        kind = (made_of(name)["source"], *(word for word in words if not word.startswith(("algorithm=", "actor."))))
        if kind in seen:
            continue
        seen.add(kind)
        config = stage(*words)
        job = Job(config)
        assert config["algorithm"]["name"] == name and config["output_dir"] == f"outputs/gsm8k/{name}"
        [(held, target)] = job.held_out.items()
        rows = load(job.train, job.needs)
        others = load(target, {"prompt", *(job.grader.fields if job.grader else job.reward.fields)})
        learned, unseen = ({row["prompt"] for row in part} for part in (rows, others))
        assert not learned & unseen
        assert held == "heldout" or (unseen == asked.keys() - solved.keys() and len(unseen) == 659)
        sizes[name] = [len(rows), len(learned), len(others)]
        if name == "reward_model":
            trains, held_out = config["data"]["train"], config["data"]["eval"]["heldout"]
            for row in [*rows, *others]:
                gold = gold_number(solved[row["prompt"]]["ground_truth"].replace("\nA: ", "\n#### "))
                assert marked_number(row["chosen"], ["####"]) == gold != marked_number(row["rejected"], ["####"])
        if name == "generative_reward_model":
            judged = config["data"]
            assert (judged["train"]["rows"], judged["eval"]["heldout"]["rows"]) == (trains, held_out)
        if name == "process_reward_model":
            check_steps([*rows[:1000], *others])
        if name == "grpo":
            assert stage("evaluate")["data"]["eval"] == config["data"]["eval"]
    expected = {"sft": [7473, 7473, 659], "reward_model": [867, 261, 299], "kto": [1980, 496, 659]}
    expected |= {"generative_reward_model": [1734, 1041, 598], "process_reward_model": [6697, 6697, 776]}
    assert expected.items() <= sizes.items()


def check_steps(rows):
    """Every calculation holds, but for that of the last step of every other solution."""
    for row in rows:
        assert all(row["labels"][:-1])
        for step, right in zip(row["completions"], row["labels"], strict=True):
            done = re.findall(r"<<([-+*/(). \d]+)=([.\d]+)>>\2", step)
            holds = [abs(eval(re.sub(r"(?<![.\d])0+(?=\d)", "", asked)) - float(said)) < 0.005 for asked, said in done]
            assert all(holds) if right else not holds[-1] and all(holds[:-1]), step
    assert sum(not row["labels"][-1] for row in rows) == pytest.approx(len(rows) / 2, rel=0.1)


@needs_data
@pytest.mark.slow
def test_every_algorithm_that_learns_from_data_takes_two_steps_on_the_real_problems(stage, tmp_path, monkeypatch):
    folder = tmp_path / "short"
    folder.mkdir()
    train, test, graded = (
        sorted(Path(GSM8K, f"{name}.jsonl").read_text().splitlines(), key=len)
        for name in ("train", "test", "model_solutions")
    )
    graded = [line for line in graded if '"is_correct": true' in line and '"is_correct": false' in line][:24]
    solved = {json.loads(line)["question"] for line in graded}
    known = [line for line in test if json.loads(line)["question"] in solved]
    others = [line for line in test if line not in known]
    rows = {"train": train[:48], "test": known + others[:2], "model_solutions": graded}
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("RFT_GSM8K_DIR", str(folder))
    small = ["steps=2", "batch.prompts=4", "rollout.max_new_tokens=8", "trajectories.rows=1"]
    width = [f"actor.model_config.{part}=8" for part in ("hidden_size", "intermediate_size", "head_dim")]
    said = {}
    for name, words in {**learning(), "grpo": ["grpo"]}.items():
        config = stage(*words, *small, *(width if words[0] == "sft" else ()))
        config["algorithm"]["group_size"] = min(config["algorithm"]["group_size"], 4)
        config["reward"]["terms"].get("format", {})["pattern"] = "(?s).*[0-9].*"  # which is met by chance
        Job(config).fit("")
        run = Path(f"outputs/gsm8k/{name}")
        said[name] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        start, *steps = said[name]
        assert [step["step"] for step in steps] == [1, 2] and config["metric"] in start
        losses = [step[key] for step in steps for key in step if key.startswith("loss/")]
        assert losses and all(map(math.isfinite, losses)) and max(step["grad_norm"] for step in steps) > 0, name
        assert (run / "checkpoints/latest/actor/config.json").is_file()

    assert said["dpo"][1]["loss/dpo"] == pytest.approx(math.log(2)), "the reference is the policy at the first step"
    assert 0 < said["reward_model"][-1]["loss/bradley_terry"] < 2
    assert "preference/baseline" in said["kto"][1] and said["on_policy_distill"][1]["kl/teacher"] > 0
    last = said["grpo"][-1]
    total = last["reward/gsm8k"] + 0.1 * last["reward/format"] + 0.2 * last["reward/model"]
    assert last["reward/mean"] == pytest.approx(total, abs=1e-5) and last["reward/model"] != 0
    assert evaluate(stage("evaluate", "rollout.max_new_tokens=8"), Console(quiet=True)) == 0.0
    told = json.loads(Path("outputs/gsm8k/grpo/evaluation.json").read_text())
    assert "outputs/gsm8k/grpo/checkpoints" in told["model"]


@needs_data
@pytest.mark.slow
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
