"""Whole runs whose rewards are functions of the user's own, in this process or in workers, and fail on some rows."""

import io
import json

import pytest
from rich.console import Console
from safetensors.torch import load_file

from rft.modes.evaluate import evaluate
from rft.setup.assembly import Job
from tests.e2e.train_stage import TrainStage
from tests.helpers import CLOCK, identical
from tests.reward.sandbox.test_sandbox_attacks import start

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = ("steps=3", "eval.every=2", "trajectories.every=1", "+reward.terms.function.weight=1.0",
         "reward.accuracy=function", "reward.terms.format.weight=0")  # fmt: skip
FUNCTIONS = """
import asyncio
from pathlib import Path

def score(response, row):
    return float(response == row["answer"]) + 0.1 * len(response)

async def waiting(response, row):
    await asyncio.sleep(0.001 * len(response))
    return score(response, row)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": score(solution_str, {"answer": ground_truth}), "letters": len(solution_str)}

def reward_func(completions, answer, **kwargs):
    return [score(text, {"answer": right}) for text, right in zip(completions, answer)]

def picky(response, row):
    if len(response) % 2:
        raise ValueError("an odd answer")
    return score(response, row)

def dead(response, row):
    if not Path(__file__).with_name("alive").exists():
        raise ConnectionError("no judge")
    return score(response, row)
"""


@pytest.fixture
def run(tiny, tmp_path):
    """Runs GRPO with a function of `FUNCTIONS`; returns its metrics without times, its weights, and its folder."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)

    def fit(function, name, *overrides):
        folder = tmp_path / name
        place = f"+reward.terms.function.function={tmp_path / 'rewards.py'}:{function}"
        Job(tiny(place, *SIZES, *overrides, f"output_dir={folder}")).fit("")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        numbers = [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]
        return numbers, load_file(folder / "checkpoints/latest/actor/model.safetensors"), folder

    return fit


@pytest.mark.parametrize(
    "kinds", [("async", "process", "verl"), pytest.param(("sandbox", "trl"), marks=pytest.mark.slow)]
)
def test_every_kind_of_worker_and_signature_trains_the_same_weights(kinds, tiny, tmp_path):
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    deadline = "+reward.terms.function.call.deadline_s=20"
    process = ("+reward.terms.function.call.workers=process", deadline)
    calls = {
        "async": ("waiting", deadline),
        "process": ("score", *process),
        "sandbox": ("score", "+reward.terms.function.call.workers=sandbox", deadline),
        "trl": ("reward_func", *process),
        "verl": ("compute_score",),
    }
    if "sandbox" in kinds:
        start().close()  # skips where a layer of the sandbox is missing
        tmp_path.chmod(0o755)

    def run(function, *overrides):
        place = f"+reward.terms.function.function={tmp_path / 'rewards.py'}:{function}"
        train = TrainStage(tiny(place, *SIZES, "warmup=none", *overrides), tmp_path)
        steps = [train.step() for _ in range(2)]
        train.close()
        numbers = [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in steps]
        return numbers, train.weights()

    numbers, weights = run("score")
    for kind in kinds:
        others, found = run(*calls[kind])
        letters = [row.pop("reward/function/letters") for row in others if "reward/function/letters" in row]
        assert others == numbers and identical(found, weights), kind
        told = 2 * (kind == "verl")
        assert len(letters) == told, "the number beside the score is logged in every step of GRPO"


def test_rows_without_a_score_are_counted_and_shown_and_do_not_train(run):
    overrides = ("+reward.terms.function.call.failed=drop_row", "reward.max_unscored=1.0")
    numbers, _, folder = run("picky", "picky", *overrides)
    steps = [row for row in numbers if row["stage"] == "train"]
    assert len(steps) == 3
    texts = [json.loads(line) for path in sorted(folder.glob("trajectories/*.jsonl")) for line in path.open()]
    sampled = [row for row in texts if row["set"] == "train"]
    odd = [row for row in sampled if len(row["response"]) % 2]
    assert odd and len(odd) < len(sampled)
    for row in sampled:
        missing = len(row["response"]) % 2 == 1
        assert (row["score"] is None) == missing == ("unscored" in row)
        assert not missing or row["unscored"] == {"function": "ValueError"}
    for row in steps:
        missing = row.get("reward/unscored", 0)
        assert missing == row.get("reward/function/unscored", 0) == row.get("reward/function/unscored/ValueError", 0)
    assert any(row.get("reward/unscored", 0) > 0 for row in steps)
    assert "no score" in (folder / "report.html").read_text()
    evaluated = [row for row in numbers if "eval/heldout/unscored" in row]
    assert all(0 < row["eval/heldout/unscored"] <= 1 for row in evaluated)


def test_a_dead_reward_stops_the_run_which_continues_once_it_is_repaired(run, tmp_path):
    overrides = ("+reward.terms.function.call.failed=drop_row", "eval.at_start=false", "eval.every=0")
    with pytest.raises(ValueError, match=r"^16 of the 16 rows of the step have no score \(function: ConnectionError"):
        run("dead", "dead", *overrides)
    assert (tmp_path / "dead/checkpoints/step_00000003").is_dir(), (
        "after two steps of the warm-up and the one without scores"
    )
    (tmp_path / "alive").touch()
    numbers, _, _ = run("dead", "dead", *overrides)
    assert [row["step"] for row in numbers] == [1, 2, 3, 4, 5] and "reward/unscored" not in numbers[-1]


def test_an_evaluation_in_which_no_answer_has_a_score_is_written_and_ends_with_one_message(tiny, tmp_path):
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    place = f"+reward.terms.function.function={tmp_path / 'rewards.py'}:dead"
    config = tiny(place, *SIZES, "mode=evaluate", "warmup=none", "+reward.terms.function.call.failed=drop_row")
    with pytest.raises(ValueError, match=r"^metric=eval/heldout/accuracy was not measured, because no answer has"):
        evaluate(config, Console(file=io.StringIO()))
    report = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert report["numbers"]["eval/heldout/unscored"] == 1.0 and "eval/heldout/accuracy" not in report["numbers"]
    answers = [json.loads(line) for line in (tmp_path / "run/answers.jsonl").open()]
    assert len(answers) == 8 and {row["score"] for row in answers} == {None}
