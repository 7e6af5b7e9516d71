"""Servers that a run starts itself."""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from rft.distributed import start
from rft.rollout.server.vllm import VLLMApi
from tests.conftest import SOON_S, alive
from tests.remote.test_process_supervisor import await_that
from tests.rollout.server import fake_server
from tests.rollout.server.scripted import SAMPLING, Announced, current, make_engine, requests, right, said, weights


class Launched(VLLMApi):
    """Fake servers as processes of their own."""

    def __init__(self, *arguments):
        super().__init__({})
        self.arguments = arguments
        self.asked = []

    def command(self, python, model, port):
        self.asked.append((python, sorted(path.name for path in model.iterdir())))
        script = [python, fake_server.__file__, "--port", str(port), *self.arguments]
        return script, {"PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def launch(tmp_path):
    """Makes an engine with servers of its own."""
    made = []

    def make(*arguments, **changes):
        options = {"count": 2, "start_s": 20.0, "sync_s": 10.0, "answer_s": 10.0} | changes
        made.append(make_engine(start("cpu"), Launched(*arguments), tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def pids(folder: Path, number: int) -> list[int]:
    """The process ids that a server has had."""
    return [int(line) for line in (folder / "servers" / f"{number}.log").read_text().split()]


def test_servers_of_its_own_are_started_synced_and_ended(launch, tmp_path):
    samples = launch()
    assert [python for python, _ in samples._server_api.asked] == [sys.executable] * 2
    [names] = {tuple(names) for _, names in samples._server_api.asked}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= set(names)
    assert not any(name.endswith(".safetensors") for name in names)
    for version in (0, 1):
        samples.update_weights(version, weights(version).items())
        assert said(samples.generate(requests(), SAMPLING)) == right(requests(), version)
    running = [*pids(tmp_path, 0), *pids(tmp_path, 1)]
    assert len(running) == 2 and all(map(alive, running))
    samples.close()
    assert not any(map(alive, running))
    samples.close()  # again, as at the end of the process


def test_a_server_that_is_killed_in_the_middle_comes_back_with_the_current_weights(launch, tmp_path, caplog):
    samples = launch("--seconds", "0.05")
    samples.update_weights(3, weights(3).items())
    seen = Announced(9, lambda: os.kill(pids(tmp_path, 0)[0], signal.SIGKILL))
    with caplog.at_level(logging.WARNING):
        assert said(samples.generate(requests(20), SAMPLING, seen)) == right(requests(20), 3)
        assert seen.all_once(20), "nothing is lost or doubled"
        await_that(lambda: current(samples) == 2)
    assert any("is restarted: it ended with status 137" in message for message in caplog.messages)
    old, new = pids(tmp_path, 0)
    assert not alive(old) and alive(new)
    os.kill(pids(tmp_path, 1)[0], signal.SIGKILL)  # so that the new one must answer
    assert said(samples.generate(requests(), SAMPLING)) == right(requests(), 3)


def test_a_server_that_was_killed_takes_part_in_the_next_version(launch, tmp_path):
    samples = launch()
    samples.update_weights(0, weights(0).items())
    os.kill(pids(tmp_path, 0)[0], signal.SIGKILL)
    samples.update_weights(1, weights(1).items())
    assert said(samples.generate(requests(), SAMPLING)) == right(requests(), 1)
    await_that(lambda: current(samples) == 2)
    samples.update_weights(2, weights(2).items())
    assert said(samples.generate(requests(), SAMPLING)) == right(requests(), 2)


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_sleeps_wakes_with_the_next_version(launch, tmp_path):
    samples = launch(count=1, sleep=True)
    samples.update_weights(0, weights(0).items())
    samples.sleep()
    os.kill(pids(tmp_path, 0)[0], signal.SIGKILL)
    samples.update_weights(1, weights(1).items())
    assert said(samples.generate(requests(), SAMPLING)) == right(requests(), 1)
    assert len(pids(tmp_path, 0)) == 2


@pytest.mark.slow
def test_a_server_that_hangs_is_started_anew(launch, tmp_path, monkeypatch):
    monkeypatch.setattr("rft.rollout.server.server_pool.PROBE_S", 0.3)
    monkeypatch.setattr("rft.remote.server_process.GRACE_S", 0.3)
    samples = launch(count=1)
    samples.update_weights(1, weights(1).items())
    vars(samples.options.servers)["start_s"] = 3.0
    [pid], [process] = pids(tmp_path, 0), samples._processes
    begun = process.started
    os.kill(pid, signal.SIGSTOP)
    await_that(lambda: process.started > begun)
    vars(samples.options.servers)["start_s"] = 20.0
    await_that(lambda: len(pids(tmp_path, 0)) == 2)
    assert not alive(pid)
    assert said(samples.generate(requests(), SAMPLING)) == right(requests(), 1)


def test_a_server_that_ends_at_once_is_an_error_with_its_last_words(launch, tmp_path):
    samples = launch("--fail", "no such device")
    begun = time.monotonic()
    log = tmp_path / "servers"
    with pytest.raises(
        OSError, match=rf"(?s)server . \(127.*\) ended with status 1; the end of {log}/.\.log:\nno such device"
    ):
        samples.update_weights(0, weights(0).items())
    assert time.monotonic() - begun < SOON_S, "no deadline is waited for"


def test_an_interpreter_that_is_not_there_is_named(launch):
    samples = launch(python="/nowhere/python")
    with pytest.raises(OSError, match=r"(?s)server . .*/nowhere/python"):
        samples.update_weights(0, weights(0).items())


def test_an_interrupted_run_leaves_no_work_behind(launch, tmp_path):
    samples = launch("--seconds", "300", count=1)
    samples.update_weights(0, weights(0).items())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what a script runs in the background
    threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        samples.generate(requests(), SAMPLING)
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < SOON_S


def test_servers_of_its_own_are_refused_where_the_run_is_on_several_machines(launch, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")  # fewer than all processes
    with pytest.raises(ValueError, match=r"^rollout\.engine\.servers\.count=2: .*several machines.*addresses"):
        launch()
