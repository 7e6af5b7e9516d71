"""An engine of one's own, named in the yaml alone, trains and evaluates the default task."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from rft.modes.doctor.run import run as doctor
from rft.setup.assembly import Job

PLUGINS = Path(__file__).parent / "plugins"


@pytest.fixture
def with_engine(tiny, monkeypatch, plugins_forgotten):
    """The config of a tiny run with the engine of the plugin."""
    monkeypatch.syspath_prepend(PLUGINS)

    def resolve(*overrides, min_tokens=1):
        config = tiny(*overrides)
        config["rollout"]["engine"] = {"_target_": "plain_engine.PlainEngine", "min_tokens": min_tokens}
        return config

    return resolve


def test_it_trains_the_default_task(with_engine, tmp_path):
    assert Job(with_engine("steps=2", "warmup=none", "eval.every=1", "actor.optimizer.lr=1e-2")).fit("") >= 0.0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    trained = [row for row in rows if row["stage"] == "train" and "reward/mean" in row]
    assert len(trained) == 2
    for row in trained:
        assert row["rollout/logprob_gap_max"] < 1e-4, "the trainer computes what the engine sampled from"
        assert row["staleness/mean"] == 0 and "eval/heldout/accuracy" in row


def test_its_own_options_reach_it_and_are_checked(with_engine, tmp_path):
    Job(with_engine("steps=1", "warmup=none", min_tokens=4)).fit("")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert rows[-1]["length/mean"] >= 4
    with pytest.raises(ValueError, match=r"rollout\.engine\.min_tokens=7: lower it to rollout\.max_new_tokens"):
        Job(with_engine(min_tokens=7))
    with pytest.raises(ValueError, match="PlainEngine draws from the whole distribution"):
        Job(with_engine("rollout.top_k=3"))
    config = with_engine()
    config["rollout"]["engine_args"] = {"dtype": "float32"}
    with pytest.raises(ValueError, match=r"rollout\.engine_args\.dtype: PlainEngine takes no arguments of an engine"):
        Job(config)
    with pytest.raises(ValueError, match=r"rollout\.engine\._target_: Path is no engine; name a class that implements"):
        Job(config | {"rollout": config["rollout"] | {"engine": {"_target_": "pathlib.Path"}}})


@pytest.mark.slow
def test_the_doctor_finds_it_sound(with_engine, capsys):
    assert doctor(with_engine("mode=doctor", "warmup=none", "rollout.temperature=0.7"), Console()) < 1e-4
    assert "✗" not in capsys.readouterr().out
