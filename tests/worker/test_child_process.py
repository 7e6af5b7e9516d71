"""What a child prints reaches stderr complete and without the values that this process hides."""

import os
import subprocess
import sys
import threading
from io import FileIO

import pytest

from rft import redaction
from rft.worker import child_process
from rft.worker.child_process import ChildProcess, forward

KEY = "sk-ä/7f3 b9"


@pytest.fixture(autouse=True)
def hidden(monkeypatch):
    monkeypatch.setattr(redaction, "_hidden", {})
    redaction.hide(KEY, "${oc.env:KEY}")
    redaction.hide("-----BEGIN KEY-----\nMIIEvQ1x\n-----END KEY-----\n", "${oc.env:PEM}")


@pytest.fixture
def forwarded():
    """What comes out where these parts are written one after another, each once the one before is read."""

    def pass_on(*parts):
        (reader, source), (result, writer) = os.pipe(), os.pipe()
        thread = threading.Thread(target=forward, args=[FileIO(reader), writer])
        thread.start()
        for part in parts:
            while part:
                part = part[os.write(source, part) :]
        os.close(source)
        thread.join()
        os.close(writer)
        with open(result, "rb") as found:
            return found.read()

    return pass_on


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([f"key={KEY}!\n".encode()], b"key=${oc.env:KEY}!\n"),
        ([f"key={KEY}"[:9].encode(), f"key={KEY}\n"[9:].encode()], b"key=${oc.env:KEY}\n"),
        ([f"no end {KEY}".encode()], b"no end ${oc.env:KEY}"),
        ([f"1 %{KEY}\r2 %".encode(), b"\rdone\n"], b"1 %${oc.env:KEY}\r2 %\rdone\n"),
        ([b"MIIEvQ1x\n", b"after\n"], b"${oc.env:PEM}\nafter\n"),
        ([b"\xff\xfe\n"], b"\xff\xfe\n"),
        ([], b""),
    ],
    ids=[
        "a line",
        "in two parts",
        "without an end",
        "a progress bar",
        "a line of a value",
        "no text",
        "nothing",
    ],
)
def test_lines_are_redacted_and_complete(parts, said, forwarded):
    assert forwarded(*parts) == said


def test_a_line_that_does_not_end_is_not_kept_for_ever(monkeypatch, forwarded):
    monkeypatch.setattr(child_process, "LONGEST", 10)
    assert forwarded(b"x" * 40_000) == b"x" * 40_000


def test_without_a_reader_of_the_terminal_the_pipe_is_still_read():
    (reader, source), (result, writer) = os.pipe(), os.pipe()
    os.close(result)
    thread = threading.Thread(target=forward, args=[FileIO(reader), writer])
    thread.start()
    line = b"x" * 999 + b"\n"
    for _ in range(1000):  # more than a pipe holds
        os.write(source, line)
    os.close(source)
    thread.join()
    os.close(writer)


def test_a_child_writes_both_streams_to_stderr_and_none_is_lost(capfd):
    code = (
        "import os, sys; print('to stdout', os.environ['KEY'])\n"
        "sys.stdout.flush(); sys.stderr.write('x' * 99 + '\\n' + ('y' * 99 + '\\n') * 9999)\n"
        "raise ValueError(os.environ['KEY'])"
    )
    child = ChildProcess([sys.executable, "-c", code], env={"KEY": KEY, "PYTHONUTF8": "1"})
    assert child.wait() == 1
    said = capfd.readouterr()
    lines = said.err.splitlines()
    assert said.out == "" and lines[0] == "to stdout ${oc.env:KEY}" and lines[1:10001] == ["x" * 99] + ["y" * 99] * 9999
    assert lines[-1] == "ValueError: ${oc.env:KEY}" and KEY not in said.err


def test_a_process_that_the_child_leaves_behind_does_not_hold_up_the_end(monkeypatch, capfd):
    monkeypatch.setattr(child_process, "DRAIN_S", 0.05)
    code = "import os, sys, time\nprint('begun', flush=True)\nif os.fork(): os._exit(3)\nsys.stdin.read()"
    child = ChildProcess([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert child.wait() == 3
    child.stdin.close()
    child._forwarding.join()
    assert capfd.readouterr().err == "begun\n"


def test_a_command_that_does_not_exist_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/no/such/command"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_other_stdout_of_a_child_is_kept(capfd):
    child = ChildProcess([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE)
    assert child.stdout.read() == b"1\n" and child.wait() == 0 and capfd.readouterr().err == ""
    child.stdout.close()
