"""Rows of environments of the package `verifiers`, which a process of its own loads."""

import importlib.util
import signal
from pathlib import Path

import pytest

from rft.data.rows.packages.verifiers import VerifiersRows
from tests import rollout

KEY = "data.train"
ENVIRONMENTS = Path(rollout.__path__[0]) / "environment" / "adapters"


@pytest.fixture
def installed(monkeypatch):
    """The package, and the environments of the tests."""
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))


def rows(id="verifiers_sums", split="train", limit=None, required=("prompt", "answer"), **args):
    return VerifiersRows(id, args, split, limit, KEY).load(required)


def test_rows_are_those_that_the_environment_makes(installed):
    handler = signal.getsignal(signal.SIGTERM)
    first, second = rows(limit=2)
    assert first["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    assert (first["answer"], first["info"], first["example_id"]) == ("2", {"kind": "odd"}, 0)
    assert second["answer"] == "4" and signal.getsignal(signal.SIGTERM) is handler


def test_rows_for_evaluation(installed):
    assert [row["answer"] for row in rows(split="eval")] == ["10", "12"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"split": "eval", "held_out": False},
            r"\.split=eval: the environment verifiers_sums has no such data set",
        ),
        ({"kind": "none"}, ": id=verifiers_sums: Failed to load environment 'verifiers_sums': 'none'"),
        ({"id": "no-such"}, ": id=no-such: Could not import 'no-such' environment"),
        ({"required": ["prompt", "chosen"]}, None),
    ],
)
def test_what_cannot_be_loaded(installed, options, message):
    expected = r"verifiers_sums\[train\] row 1: no field 'chosen'" if message is None else rf"data\.train{message}"
    with pytest.raises(ValueError, match=f"^{expected}"):
        rows(**options)


def test_a_missing_package(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "verifiers" else find(name))
    with pytest.raises(ValueError, match=r'^data\.train: the package verifiers is not installed; pip install "rft\['):
        rows()
