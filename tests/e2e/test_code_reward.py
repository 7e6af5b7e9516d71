"""A run whose reward is the tests of programs: every sampled response runs in the sandbox."""

import json

import pytest

from rft.setup.assembly import Job
from tests.helpers import file_rows
from tests.reward.sandbox.test_sandbox_attacks import start


def test_a_run_scores_its_responses_in_the_sandbox(tiny, tmp_path):
    """A response passes if it is a program that prints nothing, such as a number."""
    start().close()  # skips where a layer is missing
    for name in ("train", "heldout"):
        rows = [{"prompt": f"{n}+{name}=", "tests": [{"input": "", "output": ""}]} for n in range(16)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    terms = ("reward/terms=[code,format]", "reward.accuracy=code", "reward.terms.code.program=whole")
    config = tiny(*terms, "warmup=none", "steps=1", "trajectories.every=1")
    for name, node in (("train", config["data"]), ("heldout", config["data"]["eval"])):
        node[name] = file_rows(tmp_path / f"{name}.jsonl")
    Job(config).fit("")
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    files = sorted((tmp_path / "run/trajectories").glob("*.jsonl"))
    told = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    sandbox = start()
    outcomes = sandbox.run_many([(row["response"], "") for row in told])
    assert [row["reward/code"] for row in told] == [float(one.status == "ok" and not one.stdout) for one in outcomes]
    trained = [row["reward/code"] for row in told if row["set"] == "train"]
    assert last["reward/code"] == pytest.approx(sum(trained) / len(trained)) and "eval/heldout/accuracy" in last
    assert {row["reward/code"] for row in told} == {0.0, 1.0}
    sandbox.close()
