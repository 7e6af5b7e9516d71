"""A server process of this run's own, which ends with the run however that ends, and a port for it."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from rft.remote import process_supervisor as warden
from rft.remote.http_client import LOOK_S
from rft.rollout.server.server_api import LOCAL

GRACE_S = 5.0  # that a process has to end by itself
LONGEST_S = 60.0  # between two starts of a process that ends at once


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """A server process of our own.

    Args:
        command, environment: what is run, and what is added to the environment.
        log: the file that takes what it says.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._command = [sys.executable, warden.__file__, str(GRACE_S), *command]
        self._environment = os.environ | environment
        self._starts = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self.start()

    def start(self) -> None:
        """Starts it, and notes when it may be started again."""
        self.started = time.monotonic()
        self.again = self.started + min(2.0**self._starts, LONGEST_S)
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
        """How it ended, with its last words; empty while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        return f"ended with status {status}; the end of {self.log}:\n{self.log.read_text(errors='replace')[-2000:]}"

    def calm(self) -> None:
        """It is well: when it ends, it is started anew at once."""
        self._starts = 0

    def end(self) -> None:
        """Has it end, with all that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> None:
        """Waits until it has ended."""
        self._process.wait(2 * GRACE_S + LOOK_S)
