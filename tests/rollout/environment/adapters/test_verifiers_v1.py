"""Environments of `verifiers.v1` in their own processes, played by its own harness."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verifiers.v1")

from rft.data.rows.packages.verifiers_v1 import VerifiersTasks
from rft.rollout.environment.adapters.verifiers_v1 import VerifiersV1
from tests.rollout.environment.scripted import play

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """The tasksets of the tests can be imported, here and by the servers of their tools."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", HERE)


def config(turns=None, **taskset):
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": turns}
    return {"taskset": {"id": "verifiers_v1_sums", **taskset}, "agent": agent}


def episodes(write, env, count, **options):
    rows = VerifiersTasks(env, count, "data.train").load(("prompt",))
    node = {"verifiers": {"_target_": f"{VerifiersV1.__module__}.{VerifiersV1.__name__}", "env": env}}
    found, sampler = play(write, node, rows, workers="process", max_seconds=100.0, **options)
    return [one for [one] in found], sampler


def test_the_task_scores_an_answer_and_an_error_leaves_the_episode_without_a_score():
    found, sampler = episodes(lambda prompt: "raise" if "3+3" in prompt else "4", config(), 3)
    assert [one.episode["reward"] for one in found] == [0.25, 1.25, None]
    assert [one.episode["failed"] for one in found[:2]] == [None] * 2 and "by zero" in found[2].episode["failed"]
    assert {prompt for batch in sampler.batches for prompt in batch} == {"Add.1+1=", "Add.2+2=", "Add.3+3="}


def test_tools_and_a_limit_of_turns():
    def write(prompt):
        call = json.dumps({"name": "doubler_double", "arguments": {"number": 3}})
        return "2" if "1+1" in prompt and "</tool_call>" in prompt else f"<tool_call>{call}</tool_call>"

    found, _ = episodes(write, config(2, task={"tools": True}), 2)
    ended, cut = (one.episode for one in found)
    assert ended["failed"] is None is cut["failed"] and ended["forks"] == [] == cut["forks"]
    assert [one["content"] for one in ended["messages"] if one["role"] == "tool"] == ["6"]
    assert (ended["turns"], ended["reward"], cut["turns"], cut["reward"]) == (2, 1.5, 2, 0.5)
