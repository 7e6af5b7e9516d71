"""Problems of reasoning-gym in whole runs: an evaluation with known answers, and a step of training."""

import io
import json
import string

import pytest
from rich.console import Console

from rft.data.rows.packages.reasoning_gym import ReasoningGymRows
from rft.modes.evaluate import evaluate
from rft.setup.assembly import Job

pytest.importorskip("reasoning_gym")  # .ci/run installs it after the other tests: it needs a C compiler
TASKS = {"leg_counting": {"max_animals": 3}, "spell_backward": {"max_word_len": 6}}
RUN = (
    *("data=reasoning_gym", "reward=reasoning_gym", "warmup=none", "data.template=none", "data.system=null"),
    *("data.train.tasks={leg_counting: {max_animals: 3}, spell_backward: {max_word_len: 6}}",),
    *("data.train.count=8", "data.eval.heldout.count=3", "data.max_response_tokens=32", "reward.max_unscored=1.0"),
    *("actor.model_config.hidden_size=16", "actor.model_config.intermediate_size=32", "actor.model_config.head_dim=8"),
    "actor.model_config.max_position_embeddings=4096",
)


@pytest.fixture
def config(resolved, tmp_path):
    def resolve(*overrides):
        config = resolved(*RUN, f"output_dir={tmp_path / 'run'}", *overrides)
        config["actor"]["tokenizer"]["alphabet"] = string.printable
        return config

    return resolve


def test_an_evaluation_reports_each_task(config, tmp_path):
    rows = ReasoningGymRows(TASKS, 3, 1, "data.eval.heldout").load(["answer"])
    answers = {row["prompt"]: f"<answer>{row['answer']}</answer>" for row in rows}
    answers[rows[0]["prompt"]] = "<answer>-1</answer>"
    answers[rows[3]["prompt"]] = rows[3]["answer"]  # without the tag
    answers[rows[4]["prompt"]] = "<answer>none</answer>"
    chosen = config("mode=evaluate")
    chosen["rollout"]["engine"] = {"_target_": "tests.e2e.scripted_engine.ScriptedEngine", "answers": answers}
    assert evaluate(chosen, Console(file=io.StringIO())) == pytest.approx(3 / 6)
    numbers = json.loads((tmp_path / "run/evaluation.json").read_text())["numbers"]
    assert numbers["eval/heldout/reasoning_gym/leg_counting/accuracy"] == pytest.approx(2 / 3)
    assert numbers["eval/heldout/reasoning_gym/spell_backward/accuracy"] == pytest.approx(1 / 3)


def test_a_step_of_training(config, tmp_path):
    Job(config("steps=1", "batch.prompts=4", "algorithm.group_size=2", "eval.at_start=false", "eval.every=0")).fit("")
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["reward/reasoning_gym"] == last["reward/mean"] == 0.0, "no response of this model has the tag"
    assert "reward/unscored" not in last
