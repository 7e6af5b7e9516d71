"""A server process that the run starts and that ends with the run, and a free port for it."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from rft.redaction import redact
from rft.remote import process_supervisor
from rft.remote.http_client import PROBE_S

LOCAL = "127.0.0.1"  # where the servers that a run starts listen
GRACE_S = 5.0  # between SIGTERM and SIGKILL
LONGEST_S = 60.0  # between two starts of a process that keeps ending


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server process under `process_supervisor`, so that it ends when this process ends.

    Args:
        command, environment: the command line, and variables added to the environment.
        log: the file that receives its output.

    Attributes:
        log: as given.
        started: the time of its last start, of `time.monotonic`.
        restart_after: the earliest time of its next start; it moves away with every start until `reset_restarts`.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._command = [sys.executable, process_supervisor.__file__, str(GRACE_S), *command]
        self._environment = os.environ | environment
        self._starts = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self.start()

    def start(self) -> None:
        """Starts the process."""
        self.started = time.monotonic()
        self.restart_after = self.started + min(2.0**self._starts, LONGEST_S)
        self._starts += 1
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self) -> str:
        """The exit status and the end of the log; empty while the process runs."""
        status = self._process.poll()
        if status is None:
            return ""
        said = redact(self.log.read_text(errors="replace"))[-2000:]  # before it is cut, within a value maybe
        return f"ended with status {status}; the end of {self.log}:\n{said}"

    def reset_restarts(self) -> None:
        """Notes that the server works: when it ends, it may be restarted at once."""
        self._starts = 0

    def end(self) -> None:
        """Starts to end the process and all its children; `wait` waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> None:
        """Waits until the process has ended."""
        self._process.wait(2 * GRACE_S + PROBE_S)
