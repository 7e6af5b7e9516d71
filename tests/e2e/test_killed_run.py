"""A run, one of whose two servers is killed in the middle of sampling: nothing is lost, doubled or stale."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import rft
from tests.conftest import ENDS_S
from tests.e2e.killed import NOTE
from tests.rollout.server.real_servers import QUIET, interpreter

PYTHON = interpreter("vllm")
PROMPTS, SAMPLES = 8, 4
RUN = (
    "rollout=vllm_server",
    "rollout.engine._target_=tests.e2e.killed.KilledServers",
    "rollout.engine.servers.count=2",
    "rollout.engine.servers.poll_s=0.2",
    "rollout.engine.servers.concurrency=8",
    f"rollout.engine.servers.python={PYTHON}",
    "+rollout.engine_args.enforce_eager=true",
    "+rollout.engine_args.max_model_len=128",
    "actor.model_config.head_dim=32",
    "actor.optimizer.lr=1e-3",
    "rollout.max_new_tokens=96",
    f"batch.prompts={PROMPTS}",
    f"algorithm.group_size={SAMPLES}",
    "steps=3",
    "trajectories.every=1",
    f"trajectories.rows={PROMPTS * SAMPLES}",
)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="RFT_VLLM_PYTHON names no interpreter, and this one has no vllm")
def test_a_run_goes_on_where_a_server_is_killed_in_the_middle_of_sampling(sized, tmp_path):
    sizes = [word for word in sized("warmup=none") if "head_dim" not in word]
    command = [sys.executable, "-m", "rft.main", "output_dir=run", *sizes, *RUN]
    environment = os.environ | QUIET | {"PYTHONPATH": str(Path(rft.__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=ENDS_S)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    note = json.loads((tmp_path / NOTE).read_text())
    assert 0 < note["done"] < PROMPTS * SAMPLES, "it was killed in the middle"

    steps = [row for row in lines(tmp_path / "run" / "metrics.jsonl") if row["stage"] == "train" and row["step"]]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["rollout/logprob_gap_max"] for row in steps) < 1e-4
    assert max(row["staleness/mean"] for row in steps) == 0
    # The other server gets what the killed one owes: after the failure, or before it, as hedged requests.
    assert steps[1]["engine/retries"] + steps[1]["engine/hedged"] > 0
    assert [steps[number]["engine/retries"] for number in (0, 2)] == [0, 0]

    prompts = Counter()
    for step in (1, 2, 3):
        texts = lines(tmp_path / "run" / "trajectories" / f"step_{step:08d}.jsonl")
        texts = [row for row in texts if row["set"] == "train"]
        prompts += Counter(row["prompt"] for row in texts)
        long = [row["response"] for row in texts if len(row["response"]) > 8]
        assert len(texts) == PROMPTS * SAMPLES and len(set(long)) == len(long) > PROMPTS, "a sample that comes twice"
    assert len(prompts) == 3 * PROMPTS and set(prompts.values()) == {SAMPLES}

    assert f"server {note['number']} (127.0.0.1:" in said and "is restarted: it ended with status 137" in said
    logs = [(tmp_path / "run" / "servers" / f"{number}.log").read_text() for number in range(2)]
    starts = [log.count("Application startup complete") for log in logs]
    assert starts[note["number"]] == 2 and sum(starts) == 3
    assert note["same"], "started anew, it has the weights of then"
    assert note["before"] == 1 < note["answered"], "and those of the last step"
    assert note["held"] >= 2 and note["left"] == [], "shared memory"


def lines(file):
    return [json.loads(line) for line in file.open()]
