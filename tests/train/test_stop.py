"""Signals and the time limit, in real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from rft.distributed import SINGLE_PROCESS
from rft.errors import Stopped
from rft.train import stop
from rft.train.stop import STOPPED, StopRequest, recording_stop, seconds_of
from tests.conftest import SOON_S

WAIT = textwrap.dedent("""
    import ctypes, signal, sys, time
    from rft.train.stop import StopRequest
    signal.signal(signal.SIGINT, signal.SIG_IGN if "deaf" in sys.argv else signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)  # as nohup
    with StopRequest(None, 0, int) as request:
        print("ready", flush=True)
        if "inside" in sys.argv:
            mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
            lock(mutex)
            lock(mutex)  # waits outside of Python, as in a collective: no handler of Python can run
        while not request.asked(1):
            time.sleep(0.01)
    print(request.stopped(7), flush=True)
""")


@pytest.fixture
def start():
    processes = []

    def run(*words):
        command = [sys.executable, "-c", WAIT, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_the_first_signal_is_recorded_and_said(start, number):
    process = start()
    process.send_signal(number)
    out, err = process.communicate(timeout=SOON_S)
    assert process.returncode == 0
    assert out == f"stopped by {number.name} after step 7, with a checkpoint; the same command continues the run\n"
    assert err == f"\n{number.name}: the trainer finishes the step, saves, stops; a second signal kills it\n"


def test_the_main_thread_records_a_signal_when_no_other_thread_runs(monkeypatch, capfd):
    """On a busy machine the thread that receives signals too may run only after the next step."""
    late, watch = threading.Event(), StopRequest._watch
    monkeypatch.setattr(StopRequest, "_watch", lambda *arguments: late.wait() and watch(*arguments))
    with StopRequest(None, 0, int) as request:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.asked(1)
        late.set()
    assert str(request.stopped(1)).startswith("stopped by SIGUSR1 after step 1,")
    assert capfd.readouterr().err.count("SIGUSR1") == 1


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [("SIGTERM", "SIGTERM", 143), pytest.param("SIGUSR1", "SIGINT", 130, marks=pytest.mark.slow)],
)
def test_a_second_signal_ends_a_process_that_waits_outside_of_python(start, first, second, status):
    process = start("inside")
    process.send_signal(signal.Signals[first])
    time.sleep(0.3)
    process.send_signal(signal.Signals[second])
    time.sleep(stop.SAME_S + 0.3)
    assert process.poll() is None, "signals that come together are one"
    deadline = time.monotonic() + SOON_S
    while process.poll() is None:  # a busy process may have read the first one late
        assert time.monotonic() < deadline
        process.send_signal(signal.Signals[second])
        time.sleep(0.05)
    assert process.returncode == status


def test_what_the_process_ignores_stays_ignored(start):
    process = start("deaf")
    for number in (signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=SOON_S)[0].startswith("stopped by SIGTERM")


ON_A_TERMINAL = textwrap.dedent("""
    import fcntl, os, signal, sys, termios, time
    from pathlib import Path
    from rft.logger.console import RunConsole
    from rft.train import stop
    os.setsid()
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop.SAME_S = 0.1
    with stop.StopRequest(None, 0, int) as request:
        console = RunConsole()
        console.message("ready")
        while not request.asked(1):
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.2)  # the thread would end the process
        with console.stage("train", 0, 1):
            console.warning("to a terminal that is closed")
        for stream in (sys.stdout, sys.stderr):
            print("hello", file=stream, flush=True)
    Path(sys.argv[1]).write_text(str(request.stopped(7)))
""")


def test_a_terminal_that_is_closed_stops_the_run_and_takes_its_output(tmp_path):
    """Two SIGHUP are one: of the terminal and of the shell."""
    terminal, own = os.openpty()
    note = tmp_path / "note"
    process = subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL, str(note)], stdin=own, stdout=own, stderr=own)
    os.close(own)
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(timeout=SOON_S) == 0
    assert note.read_text().startswith("stopped by SIGHUP after step 7, with a checkpoint")


def test_after_the_block_the_handlers_are_those_of_before():
    before = [signal.getsignal(number) for number in stop.SIGNALS]
    with StopRequest(None, 0, int) as request:
        assert signal.getsignal(signal.SIGTERM) == request._handle
    assert [signal.getsignal(number) for number in stop.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_time_limit(monkeypatch):
    request = StopRequest("1m30s", 0, int)
    monkeypatch.setattr(stop, "STARTED", time.monotonic() - 80)
    assert not request.asked(1)
    monkeypatch.setattr(stop, "STARTED", time.monotonic() - 91)
    assert request.asked(1)
    assert isinstance(request.stopped(3), Stopped)
    assert str(request.stopped(3)).startswith("stopped by max_time=1m30s after step 3")
    assert str(StopRequest(None, 1, int).stopped(3)).startswith("stopped by a signal to another rank after step 3")


def test_a_stop_is_in_the_folder_and_an_error_is_not(tmp_path):
    with pytest.raises(Stopped), recording_stop(SINGLE_PROCESS, tmp_path):
        raise Stopped(3, "max_time=1m30s")
    assert json.loads((tmp_path / STOPPED).read_text()) == {"step": 3, "cause": "max_time=1m30s"}
    (tmp_path / STOPPED).unlink()
    with pytest.raises(ValueError), recording_stop(SINGLE_PROCESS, tmp_path):
        raise ValueError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "seconds"), [("3h50m", 13800), ("1d12h", 129600), ("90s", 90), ("2d1h1m1s", 2 * 86400 + 3661)]
)
def test_a_duration(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "3", "3:50:00", "50m3h", "0s", "1.5h", "-1h"])
def test_what_is_no_duration(text):
    with pytest.raises(
        ValueError, match=f"^max_time='{re.escape(text)}': write days, hours, minutes and seconds as in"
    ):
        seconds_of(text)


def test_the_last_step():
    request = StopRequest(None, 0, int, last=4)
    assert [request.asked(step) for step in (3, 4, 5)] == [False, True, True]
    assert not StopRequest(None, 0, int).asked(5)
