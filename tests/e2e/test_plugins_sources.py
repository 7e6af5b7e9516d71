"""Sources of one's own, named in the yaml alone: in every mode, in a thread, with two turns, and of chosen groups."""

import importlib
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rft.batch.columns import lengths
from rft.data.base import Source, SourceContext
from rft.data.sampler import RowSampler
from rft.distributed import SINGLE_PROCESS, stop
from rft.metrics import Metrics
from rft.modes.doctor.run import run as doctor
from rft.modes.inspect import inspect
from rft.modes.plan.report import plan
from rft.modes.verify import verify
from rft.setup.assembly import Job
from tests.rollout.source.test_rollout import SEED
from tests.rollout.source.test_rollout import source as rollout_source

PLUGINS = Path(__file__).parent / "plugins"
LISTED = {"_target_": "listed_source.ListedSource", "response": "response", "suffix": "7"}
THREADED = {"_target_": "threaded_source.ThreadedSource", "response": "response"}
TWO_TURNS = {"_target_": "two_turns.TwoTurnSource", "hint": "="}
HALF_SOLVED = {"_target_": "half_solved.HalfSolvedSource", "redraw": None, "interruption": None, "rounds": 2}


@pytest.fixture
def with_source(tiny, monkeypatch, plugins_forgotten):
    """The config of a tiny run with this source; a source that samples nothing has the loss of SFT."""
    monkeypatch.syspath_prepend(PLUGINS)

    def resolve(source, *overrides):
        given = source["_target_"] not in (TWO_TURNS["_target_"], HALF_SOLVED["_target_"])
        config = tiny(*(("algorithm=sft",) if given else ("warmup=none",)), *overrides)
        config["algorithm"]["source"] = dict(source)
        return config

    return resolve


def metrics(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]


def test_a_source_trains_and_its_options_are_checked(with_source, tmp_path):
    assert Job(with_source(LISTED, "steps=3", "eval.every=1")).fit("") >= 0.0
    trained = [row for row in metrics(tmp_path) if "loss/nll" in row]
    assert len(trained) == 3 and all("reward/mean" not in row for row in trained)
    with pytest.raises(ValueError, match=r"^algorithm\.source\.suffix=1234: it has more than 3 characters; shorten"):
        Job(with_source(LISTED | {"suffix": "1234"}))
    with pytest.raises(ValueError, match=r"algorithm\.source\.sufix: ListedSource takes response, suffix"):
        Job(with_source({**LISTED, "sufix": "1"}))


def test_a_class_that_is_no_source_is_refused(with_source):
    with pytest.raises(ValueError, match=r"algorithm\.source\._target_: Path is no source of batches; name a class"):
        Job(with_source({"_target_": "pathlib.Path"}))


class Optionless(Source):
    """A source that names no options."""


def test_a_source_without_a_dataclass_of_its_options_is_refused(with_source):
    said = r"algorithm\.source\._target_: Optionless names no dataclass of its options; give it `Options = \.\.\.`"
    with pytest.raises(ValueError, match=said):
        Job(with_source({"_target_": f"{__name__}.Optionless"}))


def test_inspect_shows_its_texts_in_its_order(with_source):
    console = Console(record=True, width=120)
    config = with_source(LISTED, "inspect.rows=2", "mode=inspect")
    inspect(config, console)
    said = console.export_text()
    job = Job(config)
    first = job.load(1).train[0]
    assert f"⟦{first['response']}7<eos>⟧" in said and "trained tokens are highlighted" in said


@pytest.mark.parametrize("source", [LISTED, pytest.param(TWO_TURNS, marks=pytest.mark.slow)])
def test_plan_and_verify_know_it(source, with_source):
    stop()  # a plan simulates a process group, and another test may have left a real one
    said = io.StringIO()
    assert plan(with_source(source, "mode=plan", "plan.prompt_tokens=null"), 1, [], Console(width=120, file=said)) > 0
    assert "peak memory of each stage" in said.getvalue()
    assert verify(with_source(source, "mode=verify"), Console()) == 1.0


def test_the_doctor_refuses_given_texts_and_examines_samples(with_source, capsys):
    with pytest.raises(ValueError, match="has no step with sampled texts only"):
        doctor(with_source(LISTED, "mode=doctor"), Console())
    assert doctor(with_source(TWO_TURNS, "mode=doctor"), Console()) < 1e-4
    assert "✗" not in capsys.readouterr().out


def test_a_thread_prepares_what_the_plain_source_draws(with_source, tmp_path):
    def losses(source, *overrides):
        Job(with_source(source, *overrides)).fit("")
        return [row["loss/nll"] for row in metrics(tmp_path) if "loss/nll" in row]

    plain = {"_target_": "rft.data.given.supervised.DatasetSource", "response": "response"}
    expected = losses(plain, "steps=4", "resume=never")
    (tmp_path / "run").rename(tmp_path / "plain")
    assert losses(THREADED, "steps=4", "resume=never") == expected
    prepared = importlib.import_module("threaded_source").PREPARED_BY
    assert len(prepared) >= 5 and all(name.startswith("prepare") for name in prepared), "one batch ahead"


def test_a_threaded_source_continues_behind_the_last_batch_that_was_taken(with_source):
    job = Job(with_source(THREADED))

    def source():
        loaded = job.load(1)
        return job.source.build(context=SourceContext(SINGLE_PROCESS, 3, loaded.encoder, loaded.train, 4, (), True))

    whole, later = source(), source()
    for _ in range(3):
        whole.next(None)
    state = whole.state_dict()
    later.next(None)
    later.load_state_dict(state)
    assert later.next(None)["unit"].tolist() == whole.next(None)["unit"].tolist() == [12, 13, 14, 15]


def test_two_sampled_segments_around_a_given_one_train(with_source, tmp_path):
    config = with_source(TWO_TURNS, "steps=2", "batch.minibatches=2")
    module = importlib.import_module("two_turns")
    module.BATCHES.clear()
    assert Job(config).fit("") >= 0.0
    trained = [row for row in metrics(tmp_path) if "reward/mean" in row]
    assert len(trained) == 2 == len(module.BATCHES)
    assert all(row["rollout/logprob_gap_max"] < 1e-4 for row in trained), "the numbers of both turns are the policy's"
    for batch in module.BATCHES:
        for row, length in enumerate(lengths(batch).tolist()):
            turns, trains = batch["turn"][row], batch["response_mask"][row]
            assert torch.equal(turns > 0, trains)
            runs = torch.unique_consecutive(turns[:length]).tolist()
            assert runs == [0, 1, 0, 2], "prompt, first answer, hint, second answer"
            assert (batch["rollout_logprobs"][row][~trains] == 0).all()
            assert (batch["rollout_logprobs"][row][trains] < 0).all()


def test_a_hint_without_room_is_refused_before_a_model_is_loaded(with_source):
    with pytest.raises(ValueError, match=r"^algorithm\.source\.hint has 5 tokens: raise rollout\.max_new_tokens to 7"):
        job = Job(with_source({**TWO_TURNS, "hint": "====="}))
        job.load(1)
        job.check.end()


def test_a_source_of_chosen_groups_trains_and_the_checks_of_its_parent_stay(with_source, tmp_path):
    assert Job(with_source(HALF_SOLVED, "steps=1")).fit("") >= 0.0
    assert sum("reward/mean" in row for row in metrics(tmp_path)) == 1
    redraw = {"term": "left", "between": None, "max_rounds": 2}
    with pytest.raises(ValueError, match=r"^algorithm\.source\.redraw\.term=left: none of reward\.terms"):
        Job(with_source({**HALF_SOLVED, "redraw": redraw}))


@pytest.mark.parametrize("size", [1, 2])
def test_the_groups_nearest_to_a_half_train_and_the_others_are_dropped(size, ranks, monkeypatch, plugins_forgotten):
    monkeypatch.syspath_prepend(PLUGINS)
    kind = importlib.import_module("half_solved").HalfSolvedSource
    signal = {1, 4, 8}

    def work(world):
        plain = rollout_source(world, signal)
        mine = kind(kind.Options(redraw=None, interruption=None, rounds=2), plain.context)
        batch = mine.next(Metrics())
        return batch["group"].tolist(), mine.dropped()["far from a half"], mine.dropped()

    taken = RowSampler(range(10), SEED).take(8)
    means = [1.0 if row in signal else 2.0 for _, row in taken]
    assert sorted(means[:8]).count(1.0) >= 1
    order = sorted(range(8), key=lambda place: means[place])
    found = ranks(size, work)
    assert sorted({group for groups, _, _ in found for group in groups}) == sorted(order[:4])
    assert sorted(position for _, dropped, _ in found for position in dropped) == sorted(order[4:])
    assert [later for _, _, later in found] == [{}] * size
