"""The lock of a run folder, held and asked for by real processes."""

import json
import os
import re
import socket
import subprocess
import sys
import textwrap

import pytest

from rft.train.folder.run_lock import LOCK, RunLock

HOLD = textwrap.dedent("""
    import sys
    from pathlib import Path
    from rft.train.folder.run_lock import RunLock
    with RunLock() as lock:
        lock.take(Path(sys.argv[1]))
        print("taken", flush=True)
        sys.stdin.read()
""")


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_and_the_first_is_named(holder, tmp_path):
    told = f"output_dir: {tmp_path} is in use by process {holder.pid} on {socket.gethostname()}."
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"), RunLock() as lock:
        lock.take(tmp_path)


def test_a_killed_process_holds_nothing(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert (tmp_path / LOCK).exists()
    with RunLock() as lock:
        assert lock.take(tmp_path) == ""
        assert json.loads((tmp_path / LOCK).read_text()) == {"host": socket.gethostname(), "pid": os.getpid()}


def test_after_the_block_the_lock_is_free(tmp_path):
    with RunLock() as lock:
        lock.take(tmp_path)
        with pytest.raises(ValueError, match=f"process {os.getpid()} "):
            RunLock().take(tmp_path)
    with RunLock() as lock:
        assert lock.take(tmp_path) == ""
