"""A run that trains on a taskset of `verifiers.v1`, played by its own harness."""

import json
from pathlib import Path

import pytest

from rft.setup.assembly import Job
from tests import rollout
from tests.rollout.environment.scripted import ALPHABET

pytest.importorskip("verifiers.v1")
FOLDER = Path(rollout.__path__[0]) / "environment"
RUN = (
    *("environment=verifiers_v1", "environment.classes.verifiers.env.taskset.id=verifiers_v1_sums", "steps=1"),
    *("data=verifiers_v1", "reward=environment", "warmup=none", "batch.prompts=2", "algorithm.group_size=2"),
    *("eval.every=0", "eval.at_start=false", "data.max_response_tokens=8", "reward.max_unscored=1.0", "cache=null"),
    *("trajectories.every=1", f"data.template={FOLDER / 'turns_with_tools.jinja'}"),
)


@pytest.mark.usefixtures("one_thread")
def test_a_step(resolved, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "adapters"))
    config = resolved(*RUN, f"output_dir={tmp_path / 'run'}", "+environment.classes.verifiers.env.taskset.count=24")
    config["actor"]["tokenizer"]["alphabet"] = ALPHABET
    Job(config).fit("")
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["rollout/logprob_gap_max"] < 1e-5, "the trainer reads the tokens that were sampled"
    [*_, file] = sorted((tmp_path / "run/trajectories").iterdir())
    found = [row["episode"] for row in map(json.loads, file.open()) if row["set"] == "train"]
    assert len(found) == 4 and all(one["failed"] is None and one["reward"] in (0.25, 1.25) for one in found)
