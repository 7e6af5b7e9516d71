"""Whole runs whose answers are episodes."""

import gc
import json
import os
import re
from pathlib import Path

import pytest

import rft
from rft.rollout.environment import turns
from rft.setup.assembly import Job
from tests.e2e.train_stage import TrainStage
from tests.helpers import CLOCK, Interrupted, identical, interrupt, numbers
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ("data.train.count=200", "data.eval.heldout.count=16", "batch.prompts=4", "algorithm.group_size=4",
         "trajectories.every=1", "strategy.device=cpu", "cache=null")  # fmt: skip
SHORT = (*SMALL, "warmup.steps=30", "warmup.rows=32", "warmup.eval_every=0", "steps=4", "eval.every=2")
ROUNDED = ("rollout/",)  # depends in the last bits on which turns the engine samples together
SELF_PLAY = Path(rft.__file__).parent.parent / "recipes" / "self_play"  # whose folder has data=nim
MINE = (*CLOCK, *ROUNDED, "episode/")


class Ones:
    """Three turns, each rewarded for the digit 1."""

    def reset(self, **row):
        self._left = 3

    def step(self, action):
        self._left -= 1
        return str(self._left), float(action.count("1")), self._left == 0, False, {}


@pytest.fixture
def patient(monkeypatch):
    """Turns are sampled together as they are on a machine that nobody else uses."""
    monkeypatch.setattr(turns, "FIRST_S", 0.5)
    monkeypatch.setattr(turns, "COLLECT_S", 0.1)


@pytest.fixture
def fit(resolved, tmp_path):
    """Runs `tool_use` with overrides in a folder; returns it."""

    def run(folder, *overrides):
        config = resolved(*SHORT, *overrides, name="tool_use")
        config["output_dir"] = str(tmp_path / folder)
        Job(config).fit("")
        return tmp_path / folder

    return run


def test_a_run_with_a_tool(fit):
    run = fit("run", "data.train.slips=0.2", "steps=1", "eval.every=1", "eval.at_start=false")
    last = numbers(run)[-1]
    assert last["episode/turns"] > 1 and last["episode/tool_calls"] > 0, "some episodes call the tool"
    assert last["episode/failed"] == 0 == last["episode/forks"]
    assert max(row.get("rollout/logprob_gap_max", 0) for row in numbers(run)) < 1e-5, "of ten tokens and more of turns"
    [*_, file] = sorted((run / "trajectories").iterdir())
    rows = [json.loads(line) for line in file.open()]
    assert {row["set"] for row in rows} == {"train", "eval/heldout"} and all("episode" in row for row in rows)
    called = next(row for row in rows if row["episode"]["tool_calls"])
    assert called["episode"]["messages"][1]["tool_calls"][0]["function"]["name"] == "calculate"
    page = (run / "report.html").read_text()
    assert "calculate(expression=" in page and 'class="turn trains"' in page


class Descriptors:
    """A logger that counts the open descriptors at each step.

    Attributes:
        counts: after each step.
    """

    def __init__(self):
        self.counts = []

    def open(self, run, config): ...

    def log(self, step, stage, numbers):
        self.counts.append(len(os.listdir("/proc/self/fd")))

    def samples(self, step, rows): ...

    def close(self, failed): ...

    def rewind(self, step): ...


@pytest.mark.slow
def test_the_steps_of_a_run_leave_no_descriptor_open(resolved, tmp_path):
    """The garbage collector, which would close descriptors, does not run."""
    config = resolved(*SMALL, "warmup=none", "steps=5", "eval.every=0", "eval.at_start=false", name="tool_use")
    config["output_dir"] = str(tmp_path / "run")
    job, counted = Job(config), Descriptors()
    job.sinks.append(counted)
    gc.disable()
    try:
        job.fit("")
    finally:
        gc.enable()
    assert len(counted.counts) == 5 and len({*counted.counts[1:]}) == 1


@pytest.mark.slow
def test_an_episode_without_a_call_trains_as_a_completion_does(fit, patient):
    """The mark is a character that the model cannot write, so that every episode has one turn."""
    unwritten = "environment.tool_format={name: mark, marks: {x: calculate}}"
    one, two = fit("plain", "environment=none"), fit("episodes", "environment=calculator", unwritten)
    plain, episodes = numbers(one), numbers(two)
    for first, second in zip(plain, episodes, strict=True):
        kept = {name: value for name, value in second.items() if not name.startswith(MINE)}
        assert kept == {name: value for name, value in first.items() if not name.startswith(MINE)}


@pytest.mark.slow
def test_an_interrupted_run_continues_with_the_episodes_that_it_kept(fit, patient, monkeypatch):
    redraw = "algorithm.source.redraw={term: exact_match, between: null, max_rounds: 3}"
    given = ("checkpoint.every=1", "data.train.slips=0.2", redraw)
    whole = fit("whole", *given)
    with monkeypatch.context() as patch:
        interrupt(patch, 33)
        with pytest.raises(Interrupted):
            fit("run", *given)
    run = fit("run", *given)
    one, other = (
        [{name: value for name, value in row.items() if not name.startswith(ROUNDED)} for row in numbers(folder)]
        for folder in (run, whole)
    )
    assert one == other
    assert identical(state(run)["actors"], state(whole)["actors"])


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm/advantage=hgpo", "reward=environment"),
        ("algorithm/advantage=gigpo", "algorithm/terms=[echo]", "reward=environment"),
        ("algorithm/advantage=rae", "reward=environment"),
        ("algorithm=reinforce_pp", "algorithm.turn_rewards={discount: 0.9, weight: 1.0}"),
    ],
    ids=lambda overrides: overrides[0],
)
def test_algorithms_that_read_columns_of_turns_train(resolved, tmp_path, overrides):
    game = (
        "environment=guessing",
        "~environment.classes.guessing",
        f"+environment.classes.ones._target_={__name__}.Ones",
    )
    config = resolved(*SMALL, *game, "warmup=none", "rollout.max_new_tokens=12", *overrides, name="tool_use")
    train = TrainStage(config, tmp_path)
    for _ in range(2):
        last = train.step()
    train.close()
    assert last["grad_norm"] > 0 and last["episode/turns"] > 1 and last["episode/failed"] == 0
    assert ("loss/echo" in last) == ("algorithm/terms=[echo]" in overrides)


def test_a_run_whose_turns_are_stopped_by_force(fit):
    stop = "algorithm.source.interruption={after: [0.3, 0.5], phrase: '='}"
    run = fit("run", "data.train.slips=0.2", "rollout.max_new_tokens=12", "eval.every=0", "eval.at_start=false",
              "warmup.steps=1", "steps=2", "algorithm/advantage=gigpo",
              "environment=guessing", "~environment.classes.guessing",
              f"+environment.classes.ones._target_={__name__}.Ones", "reward=environment", stop)  # fmt: skip
    found = numbers(run)
    assert max(row.get("rollout/interrupted", 0) for row in found) > 0
    assert max(row.get("rollout/logprob_gap_max", 0) for row in found) < 1e-5
    records = [json.loads(line) for file in (run / "trajectories").iterdir() for line in file.open()]
    for record in (row["episode"] for row in records):
        said = [message for message in record["messages"][record["opening"] :] if message["role"] == "assistant"]
        assert len(said) == record["turns"] <= 3


@pytest.mark.slow
def test_the_tiny_model_learns_to_use_the_tool(resolved, tmp_path):
    """The command of the README, shorter: with the tool it is right, without it it guesses, however long it trains."""
    for overrides, low, high in (((), 0.9, 1.0), (("environment=none", "warmup.steps=40", "steps=2"), 0.0, 0.02)):
        config = resolved("steps=8", "warmup.eval_every=0", "eval.every=8", "cache=null", *overrides, name="tool_use")
        config["output_dir"] = str(tmp_path / f"run{len(overrides)}")
        assert low <= Job(config).fit("") <= high


REFUSED = (
    ("environment=calculator", "environment: data.template=none has no form for several turns"),
    ("environment=calculator data.template=turns", "tools of environment.classes.calculator: data.template=turns"),
    ("environment=marked_calculator reward=environment", "a class of environment.classes has no get_reward"),
    ("reward=environment", "reward.terms.environment: the run has no environment"),
    ("environment=guessing algorithm=gkd", "environment: this source runs no episodes"),
    ("environment=guessing mode=plan", "environment: mode=plan runs no episodes"),
    ("environment=guessing data.template=turns environment.classes.guessing.low=101", "low=101 is above high=100"),
    ("environment=guessing data.template=turns reward=environment algorithm.turn_rewards={discount:1.0,weight:1.0}",
     "algorithm.turn_rewards: the score has the rewards of all turns already"),
    ("environment=marked_calculator algorithm.turn_rewards={discount:1.0,weight:1.0}", "turn_scores"),
    ("environment=guessing environment.max_turns=0", "environment.max_turns=0: it must be at least 1"),
    ("environment=nim data=nim reward=environment",
     "algorithm.advantage=group_norm: it compares the samples of a prompt, which are different players"),
    ("environment=nim data=nim reward=environment algorithm=remax", "algorithm.advantage=remax: it compares"),
    ("environment=nim data=nim reward=environment algorithm=raft", "algorithm.pick=best: it compares"),
    ("environment=guessing data.template=turns rollout.max_new_tokens=2"
     " algorithm.source.interruption={after:[0.5,0.6],phrase:'='}",
     "algorithm.source.interruption.phrase has 1 tokens, which with one before and one behind is more than"),
)  # fmt: skip


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(overrides, message, resolved, monkeypatch):
    monkeypatch.syspath_prepend(SELF_PLAY)
    few = (
        (f"hydra.searchpath=[file://{SELF_PLAY}]",)
        if "data=nim" in overrides
        else ("data.train.count=64", "data.eval.heldout.count=8")
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        job = Job(resolved(*overrides.split(), "warmup=none", "steps=1", "cache=null", *few))
        job.load(1)
        job.check.end()
