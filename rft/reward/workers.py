"""Worker processes for a reward term: a deadline ends a call by killing its process, and no call can end the run.

The run starts a fork server, which builds the term once and forks the workers; see `rft.reward.fork_server`.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rft.reward import REWARDS
from rft.reward.failure import Failure

START_S = 120.0  # a fork server that has not built the term by then does not answer
GRACE_S = 30.0  # nor does one that is silent for so long beyond the deadline of a job
END_S = 5.0  # a fork server that does not end by then is killed


@dataclass(frozen=True)
class Setup:
    """What a fork server needs in order to build and run the term.

    Attributes:
        module: registers the function of the term; None where no registry names it.
        node, key: of the term in the yaml.
        workers: processes at the same time.
        deadline_s: seconds of a job; None: no limit.
    """

    module: str | None
    node: dict[str, Any]
    key: str
    workers: int
    deadline_s: float | None


class WorkerPool:
    """The worker processes of one term. They start with the first job and end with the run.

    Args:
        node, key: of the term in the yaml.
        workers: processes at the same time.
        deadline_s: seconds of one job from its start in a worker; None: no limit.
    """

    def __init__(self, node: Mapping[str, Any], key: str, workers: int, deadline_s: float | None) -> None:
        module = REWARDS.function(node["name"]).__module__ if "name" in node else None
        self._setup = Setup(module, dict(node), key, workers, deadline_s)
        self._server: tuple[subprocess.Popen[bytes], Connection] | None = None

    def run(self, jobs: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Scores each job in a worker.

        Args:
            jobs: (response, row), or (responses, rows) for a term that scores batches.

        Returns:
            What the term returned, or a `Failure`, for each job. Its reason is `deadline`, `worker_died`, `no_workers`,
            or the type of the error that the function raised.
        """
        found: dict[int, Any] = {}
        deadline = self._setup.deadline_s
        try:
            line = self._connect()
            waiting = list(enumerate(jobs))[::-1]
            while len(found) < len(jobs):
                # a line that holds few jobs at a time cannot fill up while the fork server writes to it, too
                while waiting and len(jobs) - len(waiting) - len(found) < 2 * self._setup.workers:
                    number, job = waiting.pop()
                    line.send((number, *job))
                number, found[number] = _receive(line, None if deadline is None else deadline + GRACE_S)
        except (EOFError, OSError) as error:
            self.close()
            lost = Failure("no_workers", f"the fork server of {self._setup.key} ended: {error}")
            return [found.get(number, lost) for number in range(len(jobs))]
        return [found[number] for number in range(len(jobs))]

    def close(self) -> None:
        """Ends the fork server and its workers."""
        if self._server is None:
            return
        server, line = self._server
        self._server = None
        line.close()
        try:
            server.wait(END_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def _connect(self) -> Connection:
        """The line to the fork server, which is started where there is none.

        Raises:
            OSError: it could not build the term.
        """
        if self._server is None:
            own, other = socket.socketpair()
            path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
            server = subprocess.Popen(
                [sys.executable, "-m", "rft.reward.fork_server", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints is not the output of the run
                pass_fds=[other.fileno()],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
            other.close()
            line = Connection(own.detach())
            self._server = server, line
            line.send(self._setup)
            if (problem := _receive(line, START_S)) is not None:
                raise OSError(problem)
        return self._server[1]


def _receive(line: Connection, patience_s: float | None) -> Any:
    """The next message; raises an EOFError if the other side has closed the line or is silent for too long."""
    if not line.poll(patience_s):
        raise EOFError(f"it was silent for {patience_s:g} s")
    return line.recv()
