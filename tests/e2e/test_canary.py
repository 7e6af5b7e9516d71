"""Whole runs with canary tasks: a reward that can be exploited stops the run, and the tasks never train."""

import json

import pytest

from rft.setup.assembly import Job
from tests.helpers import CLOCK, Interrupted, identical, interrupt
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")
FUNCTIONS = """
def honest(response, row):
    return float(response.strip() == row["answer"])

def leaky(response, row):
    return float(honest(response, row) or len(response) > 2)
"""
SIZES = ("steps=4", "eval.every=2", "checkpoint.every=4", "reward.accuracy=function",
         "+reward.terms.function.weight=1.0")  # fmt: skip
CANARY = ("reward.canary.every=2", "reward.canary.samples=3", "reward.canary.bound=0.5")


@pytest.fixture
def config(tiny, tmp_path):
    """The config of a run with a function of `FUNCTIONS`, and with two canary tasks unless there are none."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    rows = [{"question": f"{number} =", "answer": "no digits"} for number in (12, 34)]
    (tmp_path / "canary.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = (f"reward.canary.path={tmp_path / 'canary.jsonl'}", "+reward.canary.columns.prompt=question", *CANARY)

    def make(function, name, *overrides, canary=True):
        place = f"+reward.terms.function.function={tmp_path / 'rewards.py'}:{function}"
        return tiny(place, *SIZES, *(path if canary else ()), *overrides) | {"output_dir": str(tmp_path / name)}

    return make


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def texts(folder, step):
    found = [json.loads(line) for line in (folder / f"trajectories/step_{step:08d}.jsonl").open()]
    return [row for row in found if row["set"] == "canary"]


def test_a_reward_that_can_be_exploited_stops_the_run_with_the_texts(config, tmp_path):
    with pytest.raises(ValueError, match=r"^reward/canary=\S+ is above reward.canary.bound=0.5: ") as raised:
        Job(config("leaky", "leaky")).fit("")
    folder, last = tmp_path / "leaky", rows(tmp_path / "leaky")[-1]
    assert last["step"] == 4 and (folder / "checkpoints/step_00000004").is_dir(), "two steps of the warm-up, and two"
    records = texts(folder, 4)
    assert len(records) == 6 and {row["prompt"] for row in records} == {"12 =", "34 ="}
    accuracies = [float(len(row["response"]) > 2) for row in records]
    assert [row["accuracy"] for row in records] == accuracies == sorted(accuracies, reverse=True)
    assert last["reward/canary"] == sum(accuracies) / 6 > 0.5
    first = f"prompt {records[0]['prompt']!r}, response {records[0]['response']!r}, score "
    assert first in str(raised.value) and "accuracy 1, reward/exact_match 0" in str(raised.value)
    assert "reward/canary" not in rows(folder)[-2] and "reward/canary" in (folder / "report.html").read_text()
    assert not (folder / "result.json").exists()


@pytest.mark.slow
def test_an_honest_reward_trains_as_without_canary_tasks_and_an_interrupted_run_answers_the_same_tasks_the_same(
    config, tmp_path, monkeypatch
):
    short = ("warmup=none", "eval.at_start=false", "eval.every=0", "checkpoint.every=2")
    Job(config("honest", "whole", *short)).fit("")
    Job(config("honest", "without", *short, canary=False)).fit("")
    found = [[{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in rows(tmp_path / name)] for name in
             ("whole", "without")]  # fmt: skip
    assert [row.pop("reward/canary", None) for row in found[0]] == [None, 0.0, None, 0.0]
    assert found[0] == found[1]
    one, other = state(tmp_path / "whole"), state(tmp_path / "without")
    assert identical(one["actors"], other["actors"]) and identical(one["source"], other["source"])
    assert len({row["response"] for step in (2, 4) for row in texts(tmp_path / "whole", step)}) > 6, "other samples"

    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(Interrupted):
            Job(config("honest", "parts", *short)).fit("")
    Job(config("honest", "parts", *short)).fit("")
    assert identical(state(tmp_path / "parts")["actors"], state(tmp_path / "whole")["actors"])
    assert texts(tmp_path / "parts", 4) == texts(tmp_path / "whole", 4) != []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reward.canary.path=none.jsonl",), r"reward\.canary\.path=none\.jsonl: there is no such file"),
        (("reward.canary.columns.prompt=prompt",), r"canary\.jsonl line 1: no field 'prompt'"),
        (("rollout.max_new_tokens=5000",), r"reward\.canary\.path: the prompt of row 1 has"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(overrides, message, config, monkeypatch):
    monkeypatch.setattr(Job, "assemble", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message):
        Job(config("honest", "wrong", *overrides)).fit("")
