"""mode=serve with reward terms, as a command: what it prints, what it answers, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from rich.console import Console

from rft.modes.serve.run import serve
from rft.remote.server_process import free_port
from tests.modes.serve.test_model import INTERRUPTIBLE, ROOT
from tests.reward.serving.served import ask
from tests.reward.test_workers import children

FUNCTION = "reward.terms.function.function=tests.reward.user_functions:by_command"
PROCESS = ("+reward.terms.function.call.workers=process", "+reward.terms.function.call.deadline_s=1.5")


def start(folder, *overrides):
    command = [sys.executable, "-c", INTERRUPTIBLE, sys.executable, "-m", "rft.main", "mode=serve", *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "40", "MY_KEY": "secret"}
    command += [f"output_dir={folder}/run"]
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def last_of(lines, count):
    """The last one of the next lines."""
    return [next(lines) for _ in range(count)][-1].strip()


@pytest.mark.parametrize(
    ("end", "token"), [(signal.SIGTERM, None), pytest.param(signal.SIGINT, "MY_KEY", marks=pytest.mark.slow)]
)
def test_terms_are_served_and_what_is_in_flight_at_the_end_is_answered(tmp_path, end, token):
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    named = [] if token is None else [f"serve.token={token}"]
    serving = start(tmp_path, "reward=function", FUNCTION, *PROCESS, f"serve.port={port}", *named)
    assert next(serving.stdout).strip() == f"serving the reward terms function at {address}"
    assert next(serving.stdout).strip() == "a run uses their sum with"
    place = f'"reward.terms.remote.addresses=[{address}]" reward.terms.remote.token={token or "RFT_SERVE_KEY"}'
    assert place in next(serving.stdout)
    key = "secret" if token else re.fullmatch(r"export RFT_SERVE_KEY=([\w-]{43})", last_of(serving.stdout, 2))[1]
    assert ask(f"{address}/health", token=None)[0] == 401 and ask(f"{address}/health", token=key)[1]["ready"]
    with ThreadPoolExecutor(1) as threads:
        body = {"responses": ["abc", "hang"], "rows": [{}, {}]}
        answer = threads.submit(ask, f"{address}/score", body, key)
        deadline = time.monotonic() + 20
        while len(started := children(serving.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        serving.send_signal(end)
        status, found = answer.result()
    assert status == 200 and [one["total"] for one in found["results"]] == [3.0, None]
    assert found["results"][1]["unscored"] == {"function": "deadline"}
    said, _ = serving.communicate(timeout=30)
    logged, last = said.splitlines()
    assert serving.returncode == 0 and last == "stopped" and "not done in deadline_s" in logged
    assert started and not any(Path(f"/proc/{pid}").exists() for pid in started)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["serve.token=EMPTY_KEY"], r"serve\.token=EMPTY_KEY: the environment variable is empty; set it to the key of"),
        (["serve.token=NO_SUCH_KEY"], r"serve\.token=NO_SUCH_KEY: there is no such environment variable"),
        (["reward.shard=true"], r"^reward\.shard=true: mode=serve is one process, which holds whole models; set r"),
        (["serve.limits.rows=0"], r"serve\.limits\.rows=0: it must be at least 1"),
        (["reward.call.failed=0.5"], r"reward\.call\.failed=0\.5: a server answers with the reason"),
        (
            ["+reward.terms.exact_match.call={failed: drop_group}"],
            r"reward\.terms\.exact_match\.call\.failed=drop_group",
        ),
        (
            ["serve.host=256.0.0.1", "serve.token=PATH"],
            r"serve\.port=8000, serve\.host=256\.0\.0\.1: .*; choose another",
        ),
        (["serve.host=0.0.0.0"], r"serve\.host=0\.0\.0\.0: other machines reach the servers there; set serve\.token"),
    ],
)
def test_what_cannot_be_served_is_named(overrides, message, resolved, monkeypatch):
    monkeypatch.setenv("EMPTY_KEY", "")
    with pytest.raises(ValueError, match=message):
        serve(resolved("mode=serve", *overrides), Console(quiet=True))
