"""A child process whose output reaches the terminal without the values that messages do not show."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, BinaryIO

from rft.redaction import redact

STDERR = 2  # the file descriptor
DRAIN_S = 5.0  # seconds in which the last lines of a child that has ended are read
CHUNK = 2**16  # bytes that are read at once
LONGEST = 2**20  # bytes of a line; a longer one is redacted in parts


class ChildProcess(subprocess.Popen[bytes]):
    """A child whose stdout and stderr are one pipe. This process redacts its lines and writes them to its own stderr.

    A thread reads the pipe until the last process that has it ends, so no line is lost and the child does not wait for
    this process. A line appears when it is complete, or when the child ends.

    Args:
        command: and its arguments.
        options: of `subprocess.Popen`, without `stderr`; another `stdout` than the pipe may be given.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        reader, writer = os.pipe()
        with ExitStack() as made, open(writer, "wb") as end:
            pipe = made.enter_context(open(reader, "rb", buffering=0))
            super().__init__(command, **{"stdout": end, **options, "stderr": end})
            made.pop_all()  # the thread closes it
        self._forwarding = threading.Thread(target=forward, args=[pipe, STDERR], daemon=True, name="child output")
        self._forwarding.start()

    def wait(self, timeout: float | None = None) -> int:
        """As of `Popen`; the lines of the child are written when it returns."""
        status = super().wait(timeout)
        if not sys.is_finalizing():
            self._forwarding.join(DRAIN_S)  # a process that the child has left behind may keep the pipe
        return status

    def end(self, patience_s: float) -> int:
        """Waits for the end, for which the caller has asked, and kills the child after so many seconds; its status."""
        try:
            return self.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()


def forward(pipe: BinaryIO, writer: int) -> None:
    """Writes what a pipe gets to another file, redacted, until its other ends are closed.

    Args:
        pipe: without a buffer; it is closed at the end.
        writer: descriptor of the file; text that it does not take, such as that of a closed terminal, is dropped.
    """
    with pipe:
        held = b""
        while data := pipe.read(CHUNK):
            held += data
            end = max(held.rfind(b"\n"), held.rfind(b"\r")) + 1  # a progress bar ends with a carriage return
            if len(held) > LONGEST:
                end = end or len(held)
            _write(held[:end], writer)
            held = held[end:]
        _write(held, writer)


def _write(text: bytes, writer: int) -> None:
    data = redact(text.decode(errors="surrogateescape")).encode(errors="surrogateescape")
    with suppress(OSError):
        while data:
            data = data[os.write(writer, data) :]
