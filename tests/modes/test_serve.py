"""mode=serve, with the fake server in the place of the engine's: it is started, found, looked after and ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rft.modes.serve import serve
from rft.remote.server_process import free_port
from rft.rollout.server.vllm import VLLMApi, VLLMServers

INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
ROOT = Path(__file__).parents[2]
SERVER = ROOT / "tests" / "rollout" / "server" / "fake_server.py"


class Dialect(VLLMApi):
    def command(self, python, model, port, host="127.0.0.1"):
        assert (model / "config.json").is_file() and (model / "tokenizer_config.json").is_file()
        assert not list(model.glob("*.safetensors")), "weights come from the run"
        fail = ["--fail", self._engine_args["fail"]] if "fail" in self._engine_args else []
        return [python, str(SERVER), "--port", str(port), *fail], {"PYTHONPATH": str(ROOT)}


class Servers(VLLMServers):
    @staticmethod
    def server_api(engine_args):
        return Dialect(engine_args)


def start(folder, *overrides):
    command = [sys.executable, "-m", "rft.main", "mode=serve", "rollout=vllm_server", f"output_dir={folder}/run"]
    command += ["rollout.engine._target_=tests.modes.test_serve.Servers", *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    # A script's background ignores interrupts, and so does what is started there.
    command = [sys.executable, "-c", INTERRUPTIBLE, *command]
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").is_dir() else True


def test_servers_are_started_named_and_ended(tmp_path):
    port = free_port()
    serving = start(tmp_path, f"serve.port={port}", "serve.count=2")
    said = [next(serving.stdout), next(serving.stdout)]
    addresses = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
    assert said[0].strip() == f"serving on {addresses.replace(',', ', ')}; a run samples there with"
    assert said[1].strip() == (
        f"rollout=vllm_server rollout.engine.servers.count=0 rollout.engine.servers.addresses=[{addresses}]"
    )
    pids = [int((tmp_path / "run" / "servers" / f"{number}.log").read_text().split()[0]) for number in (0, 1)]
    assert all(alive(pid) for pid in pids)
    serving.send_signal(signal.SIGINT)
    assert "stopping the servers" in serving.communicate(timeout=60)[0]
    assert not any(alive(pid) for pid in pids)


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path):
    serving = start(tmp_path, f"serve.port={free_port()}", "+rollout.engine_args.fail='no more memory'")
    said, _ = serving.communicate(timeout=60)
    assert serving.returncode == 1
    assert "mode=serve: a server ended with status 1" in said and "no more memory" in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("serve.python=/no/python", "serve.python=/no/python: there is no such program"),
        ("serve.count=0", "serve.count=0: it must be at least 1"),
        ("serve.port=80", "serve.port=80: choose one from 1024 to"),
    ],
)
def test_wrong_options_are_named(override, message, resolved):
    with pytest.raises(ValueError, match=message):
        serve(resolved("rollout=vllm_server", override), Console(quiet=True))


def test_an_engine_without_servers_is_refused(resolved):
    with pytest.raises(
        ValueError, match=r"mode=serve: rollout\.engine\._target_=HFEngine has no servers; choose a roll"
    ):
        serve(resolved("rollout=hf"), Console(quiet=True))
