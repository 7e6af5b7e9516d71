"""Worker processes for a reward term: a deadline ends a call by killing its process, and no call can end the run.

The run starts a fork server, which builds the term once and forks the workers; see `rft.reward.fork_server`.
"""

import itertools
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pickle import UnpicklingError
from typing import Any

from rft.errors import FunctionError
from rft.reward import REWARDS
from rft.reward.failure import Failure
from rft.reward.runners import Outcomes, Rows, Runner, outcomes
from rft.worker.child_process import ChildProcess

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


@dataclass(frozen=True)
class Job:
    """Responses that one worker scores together.

    Attributes:
        responses: of the job.
        message: to the fork server, pickled.
        future: receives the outcomes.
    """

    responses: Sequence[str]
    message: memoryview
    future: Future[Outcomes]

    def answer(self, found: Any, name: str) -> None:
        """Sets the outcomes from what a worker of the term `name` returned; nothing if the future is cancelled."""
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(outcomes(found, self.responses, name))
            except FunctionError as error:
                self.future.set_exception(error)


class WorkerPool(Runner):
    """The worker processes of one term. They start with the first job and end with the run.

    Args:
        name: of the term.
        node, key: of the term in the yaml.
        workers: processes at the same time.
        deadline_s: seconds of one job from its start in a worker; None: no limit.
    """

    def __init__(self, name: str, node: Mapping[str, Any], key: str, workers: int, deadline_s: float | None) -> None:
        module = REWARDS.function(node["name"]).__module__ if "name" in node else None
        self._name = name
        self._setup = Setup(module, dict(node), key, workers, deadline_s)
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards what follows, and writing to the line
        self._server: tuple[ChildProcess, Connection] | None = None
        self._ready = False  # the fork server has built the term
        self._jobs: dict[int, Job] = {}  # without a result
        self._unsent: deque[int] = deque()
        self._receiver: threading.Thread | None = None  # while there are jobs

    def submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
        """Scores responses in a worker.

        Returns:
            What the term returns, or a `Failure` for each response. Its reason is `deadline`, `worker_died`,
            `no_workers`, or the type of the error that the function raised.
        """
        number = next(self._numbers)
        message = ForkingPickler.dumps((number, list(responses), list(rows)))
        job = Job(responses, message, Future())
        with self._lock:
            if self._server is None:
                self._server, self._ready = start_fork_server(self._setup), False
            self._jobs[number] = job
            self._unsent.append(number)
            self._send(self._server[1])
            if self._receiver is None:
                self._receiver = threading.Thread(target=self._receive_all, args=[self._server[1]], daemon=True)
                self._receiver.start()
        return job.future

    def cancel(self) -> None:
        """See `Runner.cancel`; workers in the middle of a job are killed."""
        self.close()

    def close(self) -> None:
        """Ends the fork server and its workers, if they have started. The next job starts them again."""
        with self._lock:
            server, receiver = self._server, self._receiver
            if server is not None:
                with socket.socket(fileno=os.dup(server[1].fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)  # the fork server and the receiver see its end
        if receiver is not None:
            receiver.join()
        elif server is not None:
            self._end("")

    def _receive_all(self, line: Connection) -> None:
        """Receives results until there is no job; runs in a thread of its own."""
        deadline = self._setup.deadline_s
        try:
            if not self._ready:
                if (problem := _receive(line, START_S)) is not None:
                    raise OSError(problem)
                with self._lock:
                    self._ready = True
                    self._send(line)
            done = False
            while not done:
                number, found = _receive(line, None if deadline is None else deadline + GRACE_S)
                with self._lock:
                    job = self._jobs.pop(number)
                    self._send(line)
                    if done := not self._jobs:
                        self._receiver = None
                job.answer(found, self._name)
        except (EOFError, OSError, UnpicklingError, AttributeError, ImportError) as error:
            self._end(f"the fork server of {self._setup.key} ended: {error}")

    def _send(self, line: Connection) -> None:
        """Sends jobs. A line that holds few jobs cannot fill up while the fork server writes to it, too."""
        try:
            while self._ready and self._unsent and len(self._jobs) - len(self._unsent) < 2 * self._setup.workers:
                line.send_bytes(self._jobs[self._unsent[0]].message)
                self._unsent.popleft()
        except OSError:  # the receiver sees the end of the line, and ends all jobs
            return

    def _end(self, problem: str) -> None:
        """Ends the fork server; jobs without a result fail with the problem."""
        with self._lock:
            assert self._server is not None
            (server, line), self._server = self._server, None
            jobs, self._jobs, self._receiver = self._jobs, {}, None
            self._unsent.clear()
        line.close()
        server.end(END_S)
        for job in jobs.values():
            job.answer(Failure("no_workers", problem), self._name)


def start_fork_server(setup: Setup) -> tuple[ChildProcess, Connection]:
    """Starts a fork server; its first message is None, or why it could not build the term."""
    own, other = socket.socketpair()
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    server = ChildProcess(
        [sys.executable, "-m", "rft.reward.fork_server", str(other.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[other.fileno()],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    line = Connection(own.detach())
    line.send(setup)  # before `other` is closed, so that a server that has died at once raises nothing here
    other.close()
    return server, line


def _receive(line: Connection, patience_s: float | None) -> Any:
    """The next message; raises an EOFError if the other side has closed the line or is silent for too long."""
    if not line.poll(patience_s):
        raise EOFError(f"it was silent for {patience_s:g} s")
    return line.recv()
