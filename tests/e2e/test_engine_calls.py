"""When an engine works, rests and is given weights in the course of a run."""

import functools
import json

import pytest

from rft.rollout.engine.hf import HFEngine
from rft.setup.assembly import Job


@pytest.fixture
def calls(monkeypatch):
    """What a run asks of its engine, in order."""
    seen = []

    def record(name, argument):
        whole = getattr(HFEngine, name)

        def recording(engine, *given):
            seen.append(f"{name} {given[argument]}" if argument is not None else name)
            return whole(engine, *given)

        monkeypatch.setattr(HFEngine, name, recording)

    for name, argument in {
        "generate": None, "update_weights": 0, "sleep": None, "wake": 0, "abort": None, "close": None,
    }.items():  # fmt: skip
        record(name, argument)
    return seen


def given(version):
    return ["wake weights", f"update_weights {version}", "wake kv_cache"]


def test_it_rests_while_the_policy_trains_and_wakes_in_two_parts(tiny, calls):
    Job(tiny("warmup=none", "steps=2", "eval.every=1")).fit("")
    step = ["generate", "sleep"]  # rows of the step, then the update
    assert calls == [
        "sleep",  # when it is built
        *given(0), "generate",  # the evaluation before the first step
        *step, *given(1), "generate",
        *step, *given(2), "generate",
        "close",
    ]  # fmt: skip


def test_a_stage_that_samples_nothing_hands_no_weights_over_but_to_evaluate(tiny, calls):
    Job(tiny("warmup.steps=4", "warmup.eval_every=2", "warmup.stop_at=null", "steps=1")).fit("")
    warm = ["sleep", *given(0), "generate", "sleep", *given(2), "generate", "sleep", *given(4), "generate"]
    assert calls == [*warm, "generate", "sleep", *given(5), "generate", "close"]


def test_the_weights_of_the_policy_and_of_a_reference_that_samples_take_turns(tiny, calls):
    """The reference samples, as it was when its iteration began; evaluations measure the policy."""
    Job(tiny("algorithm=iterative_dpo", "algorithm.iteration=2", "warmup=none", "steps=3", "eval.every=2")).fit("")
    step = ["generate", "sleep"]
    assert calls == [
        "sleep", *given(0), "generate", "sleep",  # of the policy, for the first evaluation
        *given(0), *step, *given(0), *step, *given(2), "sleep",  # of the reference
        *given(2), "generate", "sleep",
        *given(2), *step, *given(2), "sleep",
        *given(3), "generate",
        "close",
    ]  # fmt: skip


def test_a_run_that_fails_stops_its_engine(tiny, calls, monkeypatch):
    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("rft.train.trainer.Trainer.update", fails)
    with pytest.raises(KeyboardInterrupt):
        Job(tiny("warmup=none")).fit("")
    assert calls[-2:] == ["abort", "close"]


def test_a_special_token_among_the_stop_strings_is_an_end_token(tiny, tmp_path, monkeypatch):
    """Texts are searched without special tokens. The export does not end there: no answer is trained to."""
    ends, init = [], HFEngine.__init__

    @functools.wraps(init)
    def recording(engine, *given, **options):
        init(engine, *given, **options)
        ends.append(engine.context.tokenizer.convert_ids_to_tokens(engine.ends))

    monkeypatch.setattr(HFEngine, "__init__", recording)
    Job(tiny("warmup=none", "steps=1", "eval.at_start=false", "rollout.stop=['<unk>','7']")).fit("")
    assert ends == [["<eos>", "<unk>"]]
    folder = tmp_path / "run" / "checkpoints" / "latest" / "actor"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 1
