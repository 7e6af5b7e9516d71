"""The recipes whose answers are episodes: short runs of their CPU settings."""

import json
from pathlib import Path

import pytest

import rft
from rft.setup.assembly import Job

RECIPES = Path(rft.__file__).parent.parent / "recipes"
AGENTS = {"external_agent": ("run",)}
SHORT = ("warmup.steps=2", "warmup.rows=8", "warmup.eval_every=0", "steps=2", "eval.every=0", "eval.at_start=false",
         "batch.prompts=2", "algorithm.group_size=2", "data.eval.heldout.count=2", "trajectories.every=1",
         "cache=null")  # fmt: skip


@pytest.fixture
def fit(resolved, monkeypatch, tmp_path, plugins_forgotten):
    """Runs a recipe in an empty folder; returns the metrics of its steps, and the saved texts of the last one."""

    def run(recipe, *overrides, name="run"):
        monkeypatch.syspath_prepend(RECIPES / recipe)
        monkeypatch.setenv("PYTHONPATH", str(RECIPES / recipe))
        monkeypatch.chdir(tmp_path)
        config = resolved(*overrides, f"output_dir={tmp_path / 'run'}", folder=RECIPES / recipe, name=name)
        Job(config).fit("")
        [*_, texts] = sorted((tmp_path / "run/trajectories").iterdir())
        return tuple([json.loads(line) for line in path.open()] for path in (tmp_path / "run/metrics.jsonl", texts))

    return run


def test_an_agent_with_the_client_of_openai(fit):
    warm = ("warmup.steps=30", "warmup.rows=16", "warmup.optimizer.lr=1e-2", "data.train.slips=0.0")
    rows, texts = fit("external_agent", *SHORT, *warm)
    assert [row["step"] for row in rows][-2:] == [31, 32]
    for row in rows[-2:]:
        assert row["episode/failed"] == 0 == row["episode/forks"] and row["episode/turns"] > 1
        assert row["rollout/logprob_gap_max"] < 1e-5, "the tokens of the gateway are those that the trainer reads"
    asked = [row["episode"]["messages"] for row in texts if row["episode"]["turns"] == 2]
    assert asked and {row["set"] for row in texts} == {"train", "eval/heldout"}
    for _, question, result, _ in asked:
        left, right = question["content"].removeprefix("?").split("*")
        assert result == {"role": "user", "content": f"{int(left) * int(right)}="}
