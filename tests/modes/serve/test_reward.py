"""mode=serve with reward terms: what it prints, what it answers, and how it ends."""

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
from tests.conftest import SOON_S
from tests.modes.serve.in_process import serve_until
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


class Asked:
    """Asks the server of a process for scores that take until a deadline.

    Args:
        token: the variable of the key, or None.

    Attributes:
        overrides: of the config of the server.
        started: the processes of its workers.
    """

    def __init__(self, token):
        self.port, self.token = free_port(), token
        named = [] if token is None else [f"serve.token={token}"]
        self.overrides = ["reward=function", FUNCTION, *PROCESS, f"serve.port={self.port}", *named]
        self.started = []
        self._threads = ThreadPoolExecutor(1)

    def begin(self, lines, pid):
        """Reads what the server says, and asks; returns when its workers are at work."""
        before, address, token = set(children(pid)), f"http://127.0.0.1:{self.port}", self.token
        assert next(lines).strip() == f"serving the reward terms function at {address}"
        assert next(lines).strip() == "a run uses their sum with"
        place = f'"reward.terms.remote.addresses=[{address}]" reward.terms.remote.token={token or "RFT_SERVE_KEY"}'
        assert place in next(lines)
        key = "secret" if token else re.fullmatch(r"export RFT_SERVE_KEY=([\w-]{43})", last_of(lines, 2))[1]
        assert ask(f"{address}/health", token=None)[0] == 401 and ask(f"{address}/health", token=key)[1]["ready"]
        body = {"responses": ["abc", "hang"], "rows": [{}, {}]}
        self._answer = self._threads.submit(ask, f"{address}/score", body, key)
        deadline = time.monotonic() + SOON_S
        while len(self.started) < 2 and time.monotonic() < deadline:
            self.started = sorted(set(children(pid)) - before)
            time.sleep(0.01)
        time.sleep(0.2)

    def end(self):
        """Checks what was answered, and that no worker is left."""
        status, found = self._answer.result()
        self._threads.shutdown()
        assert status == 200 and [one["total"] for one in found["results"]] == [3.0, None]
        assert found["results"][1]["unscored"] == {"function": "deadline"}
        assert self.started and not any(Path(f"/proc/{pid}").exists() for pid in self.started)


@pytest.mark.parametrize(
    ("end", "token"), [(signal.SIGTERM, None), pytest.param(signal.SIGINT, "MY_KEY", marks=pytest.mark.slow)]
)
def test_what_is_in_flight_at_the_end_is_answered(end, token, resolved, caplog, monkeypatch, tmp_path):
    monkeypatch.setenv("MY_KEY", "secret")
    asked = Asked(token)
    config = resolved("mode=serve", *asked.overrides, f"output_dir={tmp_path}/run")
    assert serve_until(config, lambda lines: asked.begin(lines, os.getpid()), end) == "stopped\n"
    assert any("not done in deadline_s" in message for message in caplog.messages)
    asked.end()


@pytest.mark.slow
@pytest.mark.parametrize(("end", "token"), [(signal.SIGTERM, None), (signal.SIGINT, "MY_KEY")])
def test_the_command_serves_terms_and_answers_what_is_in_flight_at_the_end(tmp_path, end, token):
    asked = Asked(token)
    serving = start(tmp_path, *asked.overrides)
    asked.begin(serving.stdout, serving.pid)
    serving.send_signal(end)
    said, _ = serving.communicate(timeout=SOON_S)
    logged, last = said.splitlines()
    assert serving.returncode == 0 and last == "stopped" and "not done in deadline_s" in logged
    asked.end()


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
