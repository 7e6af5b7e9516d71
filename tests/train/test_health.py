"""A run whose engine samples from another distribution says so once, on the console and in the report."""

import sys

import pytest

from rft.setup.assembly import Job
from rft.train.health import gap_warning


def test_the_warning_names_the_gap_and_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["rft", "rollout=vllm", "mode=train", "name='a b'"])
    assert gap_warning(3, {"rollout/logprob_gap_max": 1e-4}) == ""
    found = gap_warning(3, {"rollout/logprob_gap_max": 0.52})
    assert found.startswith("WARNING: rollout/logprob_gap_max=0.52 at step 3; float32 allows 0.0001. ")
    assert found.endswith(""": python -m rft.main rollout=vllm 'name='"'"'a b'"'"'' mode=doctor""")


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ((), True),
        pytest.param(("rollout.top_k=3",), False, marks=pytest.mark.slow),
        (("strategy.dtype=bfloat16",), False),
    ],
)
def test_an_engine_with_a_fault_is_warned_about_once(tiny, tmp_path, capsys, changes, warned):
    words = ("warmup=none", "steps=2", "rollout.temperature=0.7", *changes)
    fault = "rollout.engine._target_=tests.modes.doctor.broken.ForgetsTemperature"
    Job(tiny(*words, fault)).fit("")
    assert capsys.readouterr().out.count("WARNING: rollout/logprob_gap_max") == warned
    assert ("WARNING: rollout/logprob_gap_max" in (tmp_path / "run" / "report.html").read_text()) == warned
    assert (tmp_path / "run" / "warnings.txt").exists() == warned


def test_an_engine_without_a_fault_is_not(tiny, tmp_path):
    Job(tiny("warmup=none", "steps=1", "rollout.temperature=0.7")).fit("")
    assert not (tmp_path / "run" / "warnings.txt").exists()
