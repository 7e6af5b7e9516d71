"""A run that trains on environments of two servers of OpenEnv, of which one ends in an episode."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rft.setup.assembly import Job
from tests import rollout
from tests.rollout.environment.scripted import TEMPLATE

pytest.importorskip("openenv")
SERVER = Path(rollout.__path__[0]) / "environment" / "adapters" / "openenv_server.py"
RUN = (
    *(
        "environment=openenv",
        "environment.classes.openenv.action=text",
        "environment.classes.openenv.observation=shown",
    ),
    *("data=questions", "reward=environment", "warmup=none", "steps=2", "batch.prompts=4", "algorithm.group_size=4"),
    *("data.max_response_tokens=64", "environment.max_turns=3", "reward.max_unscored=1.0", "eval.every=0"),
    *("eval.at_start=false", "metric=eval/questions/accuracy", f"data.template={TEMPLATE}"),
)


@pytest.fixture
def addresses():
    """Of a server that ends in its third step, and of one that lives."""
    programs, found = [], []
    for arguments in (["64", "3"], ["64"]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        programs.append(subprocess.Popen([sys.executable, SERVER, str(port), *arguments]))
        found.append(("127.0.0.1", port))
    for address in found:
        for _ in range(1200):
            with socket.socket() as line:
                if line.connect_ex(address) == 0:
                    break
            time.sleep(0.05)
    yield [f"http://{host}:{port}" for host, port in found]
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.usefixtures("one_thread")
def test_two_steps(resolved, tmp_path, addresses):
    rows = [{"prompt": f"{n} ", "answer": "", "environment": name} for n in range(2) for name in ("dies", "openenv")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "9 ", "answer": "", "environment": "openenv"}))
    dies, lives = addresses
    config = resolved(
        *RUN, f"output_dir={tmp_path / 'run'}", f"environment.classes.openenv.url={lives}",
        f"data.train.path={tmp_path / 'rows.jsonl'}", f"data.eval.questions.path={tmp_path / 'held_out.jsonl'}",
    )  # fmt: skip
    config["environment"]["classes"]["dies"] = {**config["environment"]["classes"]["openenv"], "url": dies}
    config["actor"]["tokenizer"]["alphabet"] = "".join(sorted({*'0123456789begin at total{"}:=[] '}))  # ends soon
    Job(config).fit("")
    first, last = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()[-2:])
    assert 0 < first["episode/failed"] <= 0.5 == last["episode/failed"], "half of the rows have the server that ended"
    assert last["episode/failed/ValueError"] == 8
    assert first["grad_norm"] > 0 and last["grad_norm"] > 0 and last["reward/mean"] > 0
