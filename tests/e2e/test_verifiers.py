"""A run that trains on an environment of the package `verifiers`, with its own questions and rubric."""

import json
from pathlib import Path

import pytest

from rft.setup.assembly import Job
from tests import rollout
from tests.rollout.environment.scripted import ALPHABET

pytest.importorskip("verifiers")
FOLDER = Path(rollout.__path__[0]) / "environment"
RUN = (
    *("environment=verifiers", "environment.classes.verifiers.id=verifiers_sums", "data=verifiers", "steps=2"),
    *("reward=environment", "warmup=none", "batch.prompts=2", "algorithm.group_size=2", "eval.every=2", "cache=null"),
    *("data.max_response_tokens=8", "environment.max_turns=3", "reward.max_unscored=1.0", "trajectories.every=1"),
    f"data.template={FOLDER / 'turns_with_tools.jinja'}",
)


@pytest.mark.usefixtures("one_thread")
def test_two_steps(resolved, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "adapters"))
    config = resolved(*RUN, f"output_dir={tmp_path / 'run'}", "+environment.classes.verifiers.args.kind=twice")
    config["actor"]["tokenizer"]["alphabet"] = ALPHABET
    Job(config).fit("")
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["episode/turns"] > 1 and last["grad_norm"] >= 0
    assert last["rollout/logprob_gap_max"] < 1e-5, "the trainer reads the tokens that were sampled"
    [*_, file] = sorted((tmp_path / "run/trajectories").iterdir())
    found = [json.loads(line) for line in file.open()]
    scored = [row for row in found if row["set"] == "train" and row["episode"]["failed"] is None]
    assert scored and all(row["episode"]["reward"] == 0.25 * (2 * row["episode"]["turns"] - 1) for row in scored)
    asked = {row["prompt"][-1]["content"] for row in found if row["set"] == "eval/heldout"}
    assert asked == {"5+5=", "6+6="}
