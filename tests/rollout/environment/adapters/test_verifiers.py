"""Environments of the package `verifiers` in their own processes."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verifiers")

from rft.rollout.environment.adapters.verifiers import Verifiers
from tests.rollout.environment.scripted import play

HERE = str(Path(__file__).parent)
ROWS = [
    {"prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{n}+{n}="}], "answer": str(2 * n),
     "info": {"kind": "odd"}} for n in (1, 2, 3)
]  # fmt: skip


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The environments of the tests can be imported."""
    monkeypatch.syspath_prepend(HERE)


def episodes(write, rows, kind, id="verifiers_sums", workers="process", **options):
    target = f"{Verifiers.__module__}.{Verifiers.__name__}"
    node = {"verifiers": {"_target_": target, "id": id, "args": {"kind": kind}}}
    found, sampler = play(write, node, rows, workers=workers, max_seconds=60.0, **options)
    return [one for [one] in found], sampler


def test_one_turn():
    """The rubric: 1 for a right answer, 0.25 for the one message of the completion."""
    found, sampler = episodes(lambda prompt: "4", ROWS, "single")
    assert [one.episode["failed"] for one in found] == [None] * 3
    assert [one.episode["reward"] for one in found] == [0.25, 1.25, 0.25]
    assert sorted(prompt for batch in sampler.batches for prompt in batch) == ["Add.1+1=", "Add.2+2=", "Add.3+3="]


def test_several_turns_are_one_row():
    """Three answers: five messages behind the prompt, and the one after the end."""
    [found], sampler = episodes(lambda prompt: "end" if prompt.count("Sure?") == 2 else "2", ROWS[:1], "twice")
    assert found.episode["failed"] is None and found.episode["turns"] == 3 and found.episode["forks"] == []
    assert found.episode["reward"] == 0.25 * 6 and found.earlier == () and found.finish.reason == "stop"
    texts = [sampler.tokenizer.decode(segment.tokens) for segment in found.segments]
    assert texts == ["Add.1+1=", "2<eos>", "Sure?", "2<eos>", "Sure?", "end<eos>"]


def test_tools():
    def write(prompt):
        call = json.dumps({"name": "double", "arguments": {"number": -1 if "negative" not in prompt else 3}})
        return "6" if prompt.count("</tool_call>") == 2 else f"<tool_call>{call}</tool_call>"

    [found], sampler = episodes(write, ROWS[2:], "tools")
    assert found.episode["failed"] is None and found.episode["forks"] == []
    assert found.episode["tool_calls"] == 2 and found.episode["turns"] == 3
    outputs = [one["content"] for one in found.episode["messages"] if one["role"] == "tool"]
    assert outputs == ["negative", "6"] and sampler.batches[0][0].startswith("[double] ")
    assert found.episode["reward"] == 1.0 + 0.25 * 5


def test_an_error_that_is_not_of_the_policy_leaves_the_episode_without_a_score():
    found, _ = episodes(lambda prompt: "" if "1+1" in prompt else "end", ROWS, "twice")
    empty, gone, well = (one.episode for one in found)
    assert empty["failed"] is None and empty["reward"] == 0.0, "the policy has written nothing"
    assert gone["failed"].startswith("RuntimeError: run raised RuntimeError: InfraError") and gone["reward"] is None
    assert well["failed"] is None and well["reward"] == 0.25 * 2


def test_an_answer_beyond_max_turns_ends_the_rollout_which_is_scored():
    [found], _ = episodes(lambda prompt: "2", ROWS[:1], "twice", max_turns=2)
    assert found.episode["failed"] is None and found.episode["turns"] == 2
    assert found.episode["reward"] == 1.0 + 0.25 * 3 and found.finish.reason == "length"


def test_an_environment_that_cannot_be_loaded_is_an_error_of_the_run():
    message = r"^environment\.classes\.verifiers: id=verifiers_sums: its rubric scores all answers to a prompt together"
    with pytest.raises(ValueError, match=message):
        episodes(lambda prompt: "4", ROWS, "compared")


def test_threads_of_the_run_are_refused():
    [found, *_], _ = episodes(lambda prompt: "4", ROWS, "single", workers="inline")
    assert "set environment.workers=process" in found.episode["failed"]
