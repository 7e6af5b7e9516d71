"""Processes end with the one that started them."""

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from rft import redaction
from rft.remote import process_supervisor
from rft.remote.server_process import ServerProcess
from tests.conftest import SOON_S, alive

# A process that starts a server under a supervisor, as a run does, and waits.
STARTER = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets what it starts in the background ignore it
process = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, start_new_session=True)
process.wait()
"""
# The supervisor, which scans shared memory more often.
SCANS = f"""
import sys; sys.path.insert(0, {str(Path(process_supervisor.__file__).parent)!r})
import process_supervisor; process_supervisor.SCAN_S = 0.05
process_supervisor.main()
"""
# A server that has a worker of its own; both write their ids and leave a socket. It may be deaf to SIGTERM.
SERVER = """
import os, signal, socket, subprocess, sys, tempfile, time
socket.socket(socket.AF_UNIX).bind(tempfile.mktemp())
if sys.argv[1] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1] != "worker":
    subprocess.Popen([sys.executable, __file__, "worker"])
with open(__file__ + "." + sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
if sys.argv[1] == "short":
    time.sleep(0.3)
    sys.exit(7)
time.sleep(600)
"""


def await_that(condition):
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def temporary(monkeypatch):
    """The folder for temporary files; the path of a socket in it may have 107 bytes, which that of pytest's exceeds."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


@pytest.fixture
def serve(tmp_path):
    """Starts a server under a supervisor; returns what started it, and their ids once they run."""
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    started = []

    def run(kind, grace="0.3"):
        command = [process_supervisor.__file__, grace, sys.executable, str(script), kind]
        started.append(subprocess.Popen([sys.executable, "-c", STARTER, *command]))
        notes = [Path(f"{script}.{name}") for name in (kind, "worker")]
        await_that(lambda: all(note.exists() and note.read_text() for note in notes))
        return started[-1], [int(note.read_text()) for note in notes]

    yield run
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (signal.SIGKILL, "deaf"),
        (signal.SIGTERM, "plain"),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (signal.SIGKILL, "plain"),
                (signal.SIGTERM, "deaf"),
                (signal.SIGINT, "plain"),
                (signal.SIGINT, "deaf"),
            )
        ],
    ],
)
def test_a_server_and_its_workers_end_with_the_process_that_started_it(serve, kind, number, temporary):
    starter, pids = serve(kind)
    assert all(map(alive, pids))
    [own] = temporary.iterdir()
    assert len(list(own.iterdir())) == 2, "the server's socket and the worker's"
    os.kill(starter.pid, number)
    await_that(lambda: not any(map(alive, pids)))
    await_that(lambda: not list(temporary.iterdir()))


def test_what_a_server_leaves_behind_ends_with_it_and_its_status_is_told(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    command = [sys.executable, process_supervisor.__file__, "0.3", sys.executable, str(script), "short"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert process.wait(SOON_S) == 7
    note = Path(f"{script}.worker")
    await_that(lambda: not note.exists() or not alive(int(note.read_text())))


def test_what_tidies_up_after_a_server_may_come_to_its_end(tmp_path):
    helper = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
os.read(0, 1)  # until what holds the pipe has ended
time.sleep(0.2)
open("tidy", "w")
"""
    pipes = "stdin=subprocess.PIPE, stdout=subprocess.PIPE"
    body = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {helper!r}], {pipes}).stdout.readline()"
    command = [sys.executable, process_supervisor.__file__, "20", sys.executable, "-c", body]
    assert subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path).wait(60) == 0
    assert (tmp_path / "tidy").exists()


@pytest.mark.parametrize("ending", [pytest.param("os.killpg(0, 9)", marks=pytest.mark.slow), "time.sleep(600)"])
def test_shared_memory_of_a_server_that_is_killed_is_removed(tmp_path, ending):
    """Python's own helper, which would remove it, is killed as well. What others have, or may want, stays."""
    before = SharedMemory(create=True, size=8)
    before.close()
    try:
        body = f"""
import mmap, os, signal, time
from multiprocessing.shared_memory import SharedMemory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = SharedMemory(create=True, size=2**20)
mapped = []
ours = [(f"{{memory.name}}-{{name}}", mode) for name, mode in (("ours", 0o600), ("two", 0o600), ("all", 0o644))]
for name, mode in ({before.name!r}, 0o600), *ours:
    number = os.open(f"/dev/shm/{{name}}", os.O_RDWR | os.O_CREAT, mode)
    os.write(number, bytes(8))
    mapped.append(mmap.mmap(number, 8))
with open("name", "w") as file:
    file.write(memory.name)
time.sleep(2)  # in which the supervisor scans
{ending}
"""
        command = [sys.executable, "-c", SCANS, "0.3", sys.executable, "-c", body]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=tmp_path)
        await_that(lambda: (tmp_path / "name").exists() and (tmp_path / "name").read_text())
        memory = Path("/dev/shm", (tmp_path / "name").read_text())
        ours, two, everyones = (Path(f"{memory}-{name}") for name in ("ours", "two", "all"))
        assert memory.stat().st_size == 2**20 and ours.exists()
        with two.open("r+b") as file, mmap.mmap(file.fileno(), 8):
            if ending.startswith("time"):  # otherwise it ends by itself
                process.stdin.close()
            assert process.wait(SOON_S) == 137
        assert not memory.exists() and not ours.exists()
        assert two.exists() and everyones.exists() and Path("/dev/shm", before.name).exists()
        two.unlink()
        everyones.unlink()
    finally:
        before.unlink()


def test_a_server_that_is_killed_says_so(tmp_path):
    body = "import os; os.kill(os.getpid(), 9)"
    command = [sys.executable, process_supervisor.__file__, "0.3", sys.executable, "-c", body]
    assert subprocess.Popen(command, stdin=subprocess.PIPE).wait(SOON_S) == 137


def test_the_end_of_a_log_is_redacted_before_it_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(redaction, "_hidden", {"sk-2718281828": "${oc.env:KEY}"})
    code = "import sys; sys.stdout.write('sk-2718281828' + 'x' * 1995); sys.exit(3)"
    process = ServerProcess([sys.executable, "-c", code], {}, tmp_path / "0.log")
    process.wait()
    assert process.ended().endswith("0.log:\n:KEY}" + "x" * 1995)
    process.end()
