"""mode=serve, with the fake server in the place of the engine's: it is started, found, looked after and ended."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from rft.data.encode.tokenizer import characters
from rft.modes.serve.model import local_model
from rft.modes.serve.run import serve
from rft.remote.http_client import ServerClient
from rft.remote.server_process import free_port
from rft.rollout.engine.hf import HFEngine
from rft.rollout.engine.none import NoEngine
from rft.rollout.engine.vllm import VLLMEngine
from rft.rollout.server.sglang import SGLangApi, SGLangServers
from rft.rollout.server.vllm import VLLMApi, VLLMServers
from rft.rollout.server.weights.version import WeightVersion
from tests.conftest import ENDS_S, alive
from tests.modes.serve.in_process import serve_until
from tests.rollout.server.fake_server import FakeServer
from tests.rollout.server.scripted import load_from_folder, tied_model

INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
ROOT = Path(__file__).parents[3]
SERVED = ("rollout=vllm_server", "rollout.engine._target_=tests.modes.serve.test_model.Servers")
SERVER = ROOT / "tests" / "rollout" / "server" / "fake_server.py"


class Dialect(VLLMApi):
    def command(self, python, model, port, host="127.0.0.1", load_format="dummy"):
        assert (model / "config.json").is_file() and (model / "tokenizer_config.json").is_file()
        assert bool(list(model.glob("*.safetensors"))) == (load_format == "auto"), "else weights come from the run"
        real, _ = super().command(python, model, port, host, load_format)
        assert real[real.index("--load-format") + 1] == load_format and real[real.index("--model") + 1] == str(model)
        fail = ["--fail", self._engine_args["fail"]] if "fail" in self._engine_args else []
        return [python, str(SERVER), "--port", str(port), *fail], {"PYTHONPATH": str(ROOT)}


class Servers(VLLMServers):
    @staticmethod
    def server_api(engine_args, media=None, forbidden=()):
        return Dialect(engine_args)


def start(folder, *overrides):
    command = [sys.executable, "-m", "rft.main", "mode=serve", *SERVED, f"output_dir={folder}/run", *overrides]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    # A script's background ignores interrupts, and so does what is started there.
    command = [sys.executable, "-c", INTERRUPTIBLE, *command]
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def check_two_servers(lines, port, folder):
    """What is said of two servers, whose process ids this returns, and that they ask for the key."""
    said = [next(lines) for _ in range(5)]
    addresses = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
    assert said[0].strip() == "waiting for weights: no request is answered until a run sends them"
    assert said[1].strip() == f"addresses: {addresses.replace(',', ', ')}; a run samples there with"
    assert said[2].strip() == (
        f"rollout=vllm_server rollout.engine.servers.count=0 rollout.engine.servers.addresses=[{addresses}]"
        " rollout.engine.servers.token=RFT_SERVE_KEY"
    )
    key = re.fullmatch(r"export RFT_SERVE_KEY=([\w-]{43})", said[4].strip())[1]
    assert paused(port, key) and paused(port + 1, key)
    for wrong in ("", "another"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            paused(port, wrong)
    kept = [path for path in (folder / "run").rglob("*") if path.is_file() and key.encode() in path.read_bytes()]
    assert kept == [], "the key is printed alone"
    pids = [int((folder / "run" / "servers" / f"{number}.log").read_text().split()[0]) for number in (0, 1)]
    assert all(alive(pid) for pid in pids)
    return pids


@pytest.mark.parametrize("engine", [HFEngine, NoEngine, SGLangServers, VLLMEngine, VLLMServers])
def test_an_engine_with_servers_states_it(engine):
    assert engine.facts.servers == ("server_api" in dir(engine))


def test_servers_are_started_named_and_ended(resolved, monkeypatch, tmp_path):
    monkeypatch.setattr("rft.modes.serve.model.PAUSE_S", 0.05)
    port, pids = free_port(), []
    config = resolved("mode=serve", *SERVED, f"output_dir={tmp_path}/run", f"serve.port={port}", "serve.count=2")
    rest = serve_until(config, lambda lines: pids.extend(check_two_servers(lines, port, tmp_path)))
    assert rest == "stopping the servers\n"
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_the_command_starts_names_and_ends_servers(tmp_path):
    port = free_port()
    serving = start(tmp_path, f"serve.port={port}", "serve.count=2")
    pids = check_two_servers(serving.stdout, port, tmp_path)
    serving.send_signal(signal.SIGINT)
    assert "stopping the servers" in serving.communicate(timeout=ENDS_S)[0]
    assert not any(alive(pid) for pid in pids)


def paused(port, key):
    address, headers = f"http://127.0.0.1:{port}/is_paused", {"Authorization": f"Bearer {key}"}
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as answer:
        return json.load(answer)["is_paused"]


def write_run(folder):
    """A run with one checkpoint, as find_checkpoint sees it; returns the folder of its model."""
    model = folder / "checkpoints" / "step_00000007" / "actor"
    tied_model(30).save_pretrained(model)
    characters(alphabet="0123456789").save_pretrained(model)
    (folder / "config.yaml").touch()
    return model


@pytest.mark.slow
def test_a_checkpoint_is_served_with_its_weights_and_answers_at_once(tmp_path):
    model, port = write_run(tmp_path / "run"), free_port()
    serving = start(tmp_path, f"serve.port={port}")
    assert next(serving.stdout).strip() == f"serving {model.resolve()}"
    *_, last = (next(serving.stdout) for _ in range(4))
    assert not paused(port, last.strip().removeprefix("export RFT_SERVE_KEY="))
    serving.send_signal(signal.SIGINT)
    serving.communicate(timeout=ENDS_S)


def test_a_folder_is_served_as_it_is(tmp_path):
    model = write_run(tmp_path)
    assert local_model(str(model), "actor.path") == model.resolve()
    (model / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"actor\.path=.* has no weights \(\*\.safetensors\)"):
        local_model(str(model), "actor.path")


def test_an_adapter_without_its_model_is_not_served(tmp_path):
    model = write_run(tmp_path)
    (model / "config.json").unlink()
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    with pytest.raises(
        ValueError, match=r"serve\.checkpoint=.*: an adapter, and the servers need a whole model; merge"
    ):
        local_model(str(model), "serve.checkpoint")


def test_a_model_that_is_not_there_names_the_key(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"actor\.path=.*nowhere: no folder, and not found on the hub"):
        local_model(str(tmp_path / "nowhere"), "actor.path")


def test_a_checkpoint_that_is_not_there_names_the_key(resolved, tmp_path):
    write_run(tmp_path)
    with pytest.raises(ValueError, match=r"serve\.checkpoint=9: .* its checkpoints are of the steps 7"):
        serve(resolved("rollout=vllm_server", "serve.checkpoint=9", f"output_dir={tmp_path}"), Console(quiet=True))


def test_a_tokenizer_that_would_not_be_served_is_refused(resolved, tmp_path):
    model, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    config = resolved(
        "rollout=vllm_server",
        "actor=hf",
        f"actor.path={model}",
        f"actor.tokenizer.path={other}",
        "serve.checkpoint=null",
    )
    with pytest.raises(ValueError, match=r"actor\.tokenizer=.*: mode=serve serves the tokenizer beside the model"):
        serve(config, Console(quiet=True))


@pytest.mark.parametrize("api", [VLLMApi({}), SGLangApi({})], ids=["vllm", "sglang"])
def test_a_held_server_answers_after_it_has_weights(api, tmp_path):
    """Holding is repeated while nothing has come, and a server that has weights is not held."""
    server = FakeServer()
    client = ServerClient.at(0, server.address)
    for _ in range(2):
        asyncio.run(api.hold(client))
        assert server.paused and asyncio.run(api.version(client)) is None
    folder = write_run(tmp_path)
    asyncio.run(load_from_folder(api, client, WeightVersion(3, folder, {}, None)))
    assert not server.paused and asyncio.run(api.version(client)) == 3
    asyncio.run(api.hold(client))
    assert not server.paused
    server.kill()


@pytest.mark.slow
def test_a_server_that_ends_is_told_with_its_last_words(tmp_path):
    serving = start(tmp_path, f"serve.port={free_port()}", "+rollout.engine_args.fail='no more memory'")
    said, _ = serving.communicate(timeout=ENDS_S)
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
