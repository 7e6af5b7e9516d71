"""Workers and their fork server: calls, deadlines, deaths, and that nothing is left behind. All of it real."""

import asyncio
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from rft.worker import worker as worker_module
from rft.worker.worker import ForkServer, Worker, WorkerLost
from tests.conftest import SOON_S, alive


def prepare(value):
    if value == "wrong":
        raise ValueError("the value is wrong")
    if value == "hang":
        time.sleep(600)
    if value == "die":
        os._exit(5)
    counts = []

    def work(command):
        if command == "hang":
            re.match("(a+)+$", "a" * 99 + "b")  # no other thread of the process runs
        if command == "die":
            os._exit(7)
        if command == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if command == "error":
            raise KeyError("no such thing")
        if command == "leave":
            raise SystemExit("the last words")
        if command == "child":
            return str(subprocess.Popen(["sleep", "600"], close_fds=False).pid).encode()
        if command == "long":
            return bytes(2**21)
        counts.append(command)
        return f"{value} {len(counts)} {os.getpid()}".encode()

    return work


def fork_server(value="a", **options):
    return ForkServer("the fork server of tests", prepare, (value,), {}, **{"start_s": SOON_S, **options})


@pytest.fixture(scope="module")
def server():
    made = fork_server(most=2**20)
    yield made
    made.close()


def ask(worker, command, deadline_s=SOON_S):
    return asyncio.run(worker.call(pickle.dumps((command,)), deadline_s)).decode()


def lost(worker, command, deadline_s=SOON_S):
    with pytest.raises(WorkerLost) as found:
        ask(worker, command, deadline_s)
    assert worker.lost
    return found.value.reason, str(found.value)


def test_every_worker_begins_as_the_server_has_prepared_it(server):
    one, two = server.fork(), server.fork()
    first, second = [ask(one, "count"), ask(one, "count")], ask(two, "count")
    assert [text.split()[:2] for text in (*first, second)] == [["a", "1"], ["a", "2"], ["a", "1"]]
    pids = {int(text.split()[2]) for text in (*first, second)}
    assert len(pids | {os.getpid(), server.pid}) == 4
    for worker in (one, two):
        worker.end()
    assert not any(map(alive, pids)) and one.lost


ENDS = {
    "die": ("worker_died", "the worker process ended with status 7"),
    "kill": ("worker_died", "the worker process ended with signal 9"),
    "long": ("output", f"it answers with {2**21} bytes, more than {2**20}"),
}


@pytest.mark.parametrize("command", ENDS)
def test_a_worker_without_an_answer_is_lost_with_its_reason(server, command):
    assert lost(server.fork(), command) == ENDS[command]


def test_an_error_ends_a_worker_and_is_printed(capfd):
    made = fork_server()
    for command in ("error", "leave"):
        assert lost(made.fork(), command) == ("worker_died", "the worker process ended with status 1")
    made.close()
    printed = capfd.readouterr().err
    assert "KeyError: 'no such thing'" in printed and "the last words\n" in printed


def test_a_deadline_ends_the_worker_and_what_it_has_started(server):
    worker = server.fork()
    pids = int(ask(worker, "count").split()[2]), int(ask(worker, "child"))
    assert sys.platform != "linux" or all(map(alive, pids))
    assert lost(worker, "hang", 0.05) == ("deadline", "the worker is silent for 0.05 s")
    deadline = time.monotonic() + SOON_S
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(alive, pids))
    assert ask(server.fork(), "count").startswith("a 1"), "the server forks on"


def test_a_call_that_is_cancelled_ends_its_worker(server):
    async def use():
        worker = server.fork()
        call = asyncio.create_task(worker.call(b"", None))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return worker

    assert asyncio.run(use()).lost


def test_a_dead_server_loses_its_workers_and_is_started_anew():
    made = fork_server()
    worker, other = made.fork(), made.fork()
    made._process.kill()
    made._process.wait()
    assert lost(worker, "count") == ("no_workers", "the fork server of tests ended with status -9; see its error above")
    new = made.fork()
    assert ask(new, "count").startswith("a 1")
    assert other.end().reason == "no_workers"
    assert ask(new, "count").startswith("a 2"), "its number means nothing to the new server"
    made.close()
    assert made.pid is None


def test_a_server_that_cannot_prepare_the_work_is_an_error(monkeypatch):
    with pytest.raises(ValueError, match=r"^the value is wrong$"):
        fork_server("wrong").start()
    with pytest.raises(OSError, match=r"^the fork server of tests ended with status 5; see its error above$"):
        fork_server("die").fork()
    slow = fork_server("hang", start_s=0.1)
    with pytest.raises(TimeoutError, match=r"^the fork server of tests has not answered within 0\.1 s$"):
        slow.start()
    assert slow.pid is None


def test_a_server_that_answers_no_request_is_ended(monkeypatch):
    monkeypatch.setattr(worker_module, "ANSWER_S", 0.1)
    made = fork_server()
    worker, pid = made.fork(), made.pid
    os.kill(pid, signal.SIGSTOP)
    assert str(worker.end()) == "the fork server of tests has not answered within 0.1 s"
    assert made.pid is None and not alive(pid)


def test_what_silent_workers_print_is_dropped(capfd):
    made = fork_server(silent=True)
    lost(made.fork(), "leave")
    made.close()
    assert capfd.readouterr() == ("", "")


def test_a_worker_is_lost_once_its_process_has_closed_the_line():
    own, other = socket.socketpair()
    worker = Worker(own, lambda died: WorkerLost("worker_died", "it ended"))
    assert not worker.lost
    other.close()
    assert worker.lost
    worker.end()


WORK = """
import os, pickle

def prepare():
    return lambda command: os._exit(7) if command == "die" else command.encode()

def message(command):
    return pickle.dumps((command,))
"""
USE = """
import asyncio, os
from rft.worker.worker import ForkServer, WorkerLost
from work import message, prepare

before = len(os.listdir("/dev/fd"))
server = ForkServer("a fork server", prepare, (), {}, start_s=SOON_S)
for command, ends in (("count", False), ("count", True), ("die", False)):
    worker = server.fork()
    try:
        asyncio.run(worker.call(message(command), SOON_S))
    except WorkerLost:
        assert command == "die"
    if ends:
        worker.end()
server.close()
del worker
print(len(os.listdir("/dev/fd")) - before)
"""


def test_no_descriptor_stays_open(tmp_path):
    (tmp_path / "work.py").write_text(WORK)  # in a process without the descriptors of other tests
    (tmp_path / "use.py").write_text(USE.replace("SOON_S", str(SOON_S)))
    used = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (used.stdout, used.stderr) == ("0\n", "")


def test_the_room_imports_no_torch():
    code = "import sys, rft.worker.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
