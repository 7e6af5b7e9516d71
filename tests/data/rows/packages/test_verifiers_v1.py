"""Tasks of tasksets of `verifiers.v1`, which a process of its own loads."""

import importlib.util
from pathlib import Path

import pytest

from rft.data.rows.packages.verifiers_v1 import VerifiersTasks
from tests import rollout

KEY = "data.train"


@pytest.fixture
def installed(monkeypatch):
    """The package, and the taskset of the tests."""
    pytest.importorskip("verifiers.v1")
    monkeypatch.syspath_prepend(str(Path(rollout.__path__[0]) / "environment" / "adapters"))


def rows(limit=None, agent=None, required=("prompt",), id="verifiers_v1_sums", **taskset):
    env = {"taskset": {"id": id, **taskset}, **({} if agent is None else {"agent": agent})}
    return VerifiersTasks(env, limit, KEY).load(required)


def test_rows_are_the_tasks(installed):
    first, second = rows(limit=2)
    assert first["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    assert first["task"].items() >= {"idx": 0, "answer": "2", "prompt": "1+1=", "system_prompt": "Add."}.items()
    assert second["task"]["answer"] == "4"
    assert len(rows(count=5)) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"asked": False}, r"data\.train: task 0 has no prompt; choose"),
        ({"id": "no-such"}, r"data\.train\.env: taskset 'no-such' not found"),
        ({"no_such_option": 1}, r"data\.train\.env: .*no_such_option"),
        ({"agent": {"harness": {"id": "no-such"}}}, r"data\.train\.env: harness 'no-such' not found"),
        ({"required": ["answer"]}, r"task 0: no field 'answer'"),
    ],
)
def test_what_cannot_be_loaded(installed, options, message):
    with pytest.raises(ValueError, match=rf"(?s)^{message}"):
        rows(**options)


def test_a_missing_package(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "verifiers" else find(name))
    with pytest.raises(
        ValueError, match=r"^data\.train: the package verifiers, 0\.4 or later, is not installed; pip i"
    ):
        rows()
