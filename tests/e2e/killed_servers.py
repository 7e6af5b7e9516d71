"""An asynchronous run with a real vLLM server: both are killed, and the run continues with all that was sampled."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from transformers import AutoTokenizer

import rft
from rft.train.checkpoint.saved_state import SavedState
from tests.conftest import ENDS_S
from tests.e2e.killed import signal_all
from tests.rollout.server.real_servers import QUIET, gone, processes_of, until

PROMPTS, SAMPLES = 8, 2
RUN = (
    "rollout=vllm_server",
    "rollout.engine.servers.poll_s=0.2",
    "+rollout.engine_args.enforce_eager=true",
    "+rollout.engine_args.max_model_len=192",
    "rollout.staleness=2",
    "rollout.while_updating=abort",
    "rollout.max_new_tokens=160",
    "algorithm.old_logprobs=rollout",
    f"algorithm.group_size={SAMPLES}",
    f"batch.prompts={PROMPTS}",
    "actor.model_config.head_dim=32",
    "actor.model_config.max_position_embeddings=192",
    "actor.optimizer.lr=1e-3",
    "eval.every=0",
    "eval.at_start=false",
    "checkpoint.every=1",
    "checkpoint.keep_last=1",
    "trajectories.every=1",
    f"trajectories.rows={PROMPTS * SAMPLES}",
)


def check_kills(sized, folder, python, kills):
    """Kills a run at random moments, and before the first time its server.

    Args:
        sized: the fixture.
        folder: for the run.
        python: that has vLLM.
        kills: of the run.
    """
    draw, run, kept = random.Random(5), folder / "run", []
    steps = 3 * kills + 4
    sizes = [word for word in sized("warmup=none") if "head_dim" not in word]
    command = [sys.executable, "-m", "rft.main", "output_dir=run", *sizes, *RUN, f"steps={steps}"]
    command += [f"rollout.engine.servers.python={python}"]
    environment = os.environ | QUIET | {"PYTHONPATH": str(Path(rft.__file__).parent.parent)}

    @contextmanager
    def started():
        """A process of the run, which is killed at the end of the block if it still runs."""
        with (folder / "said").open("a") as said:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def goes_on(process, more):
        enough = len(trained(run)) + more
        until(lambda: len(trained(run)) >= enough or process.poll() is not None, ENDS_S)
        assert process.poll() is None, (folder / "said").read_text()

    for number in range(kills):
        with started() as process:
            goes_on(process, 1)
            if number == 0:
                signal_all(server_of(run), signal.SIGKILL)
                goes_on(process, 2)
            time.sleep(draw.uniform(0, 1))  # a random moment
            own = server_of(run)
        until(partial(gone, own), ENDS_S)
        kept.append(SavedState((run / "checkpoints" / "latest").resolve())["source"]["ahead"])
    with started() as process:
        assert process.wait(ENDS_S) == 0, (folder / "said").read_text()

    rows = trained(run)
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert max(row["staleness/max"] for row in rows) <= 2
    ledger = SavedState((run / "checkpoints" / "latest").resolve())["ledger"]
    assert ledger == {"train": {"trained": [[0, steps * PROMPTS - 1]]}}, "every prompt trains once"

    files = (run / "trajectories" / f"step_{step:08d}.jsonl" for step in range(1, steps + 1))
    texts = [json.loads(line) for file in files for line in file.open()]
    responses = [row["response"] for row in texts if row["set"] == "train"]
    assert len(responses) == steps * PROMPTS * SAMPLES
    tokenizer = AutoTokenizer.from_pretrained(run / "checkpoints" / "latest" / "actor")
    done = [row["fields"]["text"] for ahead in kept for group in ahead["done"] for row in group]
    begun = [tokenizer.decode(one["tokens"], skip_special_tokens=True) for ahead in kept for one in ahead["begun"]]
    assert done or begun, "checkpoints with answers"
    assert set(done) <= set(responses), "an answer of a checkpoint is not sampled again"
    assert all(any(text.startswith(part) for text in responses) for part in begun), "what had begun continues"


def trained(run):
    """The lines of the steps of a run."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row["stage"] == "train" and row["step"] > 0]


def server_of(run):
    """The processes of the server that a run has started last."""
    ports = re.findall(r"Starting vLLM server on http://127\.0\.0\.1:(\d+)", (run / "servers" / "0.log").read_text())
    return processes_of(ports[-1])
