"""The fork server of a reward term: `python -m rft.reward.fork_server <file descriptor>`, started by `WorkerPool`.

It builds the term once and has no threads, so it can fork a worker in milliseconds. Each worker runs one job at a time.
A worker that does not answer within the deadline is killed with the processes it has started, and another takes its
place. The fork server and its workers end when the run closes its end of the line, or dies.
"""

import asyncio
import ctypes
import importlib
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from rft.reward.build import build_term
from rft.reward.failure import Failure, catching
from rft.reward.term import Term, values_of
from rft.reward.workers import Setup

PR_SET_PDEATHSIG = 1


@dataclass
class Worker:
    """A forked process.

    Attributes:
        pid: its number.
        line: to it.
        job: the number of the job that it runs; None while it waits for one.
        started: when the job started, in seconds of the monotonic clock.
    """

    pid: int
    line: Connection
    job: int | None = None
    started: float = 0.0


class ForkServer:
    """Forwards the jobs of the run to workers.

    Args:
        line: to the run.
        term: scores the jobs.
        setup: says how many workers there are and how long a job may take.
    """

    def __init__(self, line: Connection, term: Term, setup: Setup) -> None:
        self._line = line
        self._term = term
        self._setup = setup
        self._workers: list[Worker] = []
        self._jobs: deque[tuple[int, Any, Any]] = deque()

    def serve(self) -> None:
        """Runs jobs until the run closes the line."""
        try:
            while True:
                self._assign()
                busy = {worker.line: worker for worker in self._workers if worker.job is not None}
                for ready in wait([self._line, *busy], self._next_deadline()):
                    if ready is self._line:
                        self._jobs.append(self._line.recv())
                    else:
                        self._collect(busy[ready])  # type: ignore[index]
                self._kill_overdue()
        except (EOFError, OSError):  # the run has ended
            pass
        finally:
            for worker in list(self._workers):
                self._end(worker)

    def _assign(self) -> None:
        while self._jobs:
            worker = next((worker for worker in self._workers if worker.job is None), None)
            if worker is None:
                if len(self._workers) == self._setup.workers:
                    return
                worker = self._fork()
            try:
                worker.line.send(self._jobs[0])
            except OSError:  # it died while it waited
                self._end(worker)
                continue
            worker.job, worker.started = self._jobs.popleft()[0], time.monotonic()

    def _collect(self, worker: Worker) -> None:
        try:
            found = worker.line.recv()
        except (EOFError, OSError):
            self._lose(worker)
            return
        number, worker.job = worker.job, None
        self._line.send((number, found))

    def _lose(self, worker: Worker) -> None:
        """Answers for a worker that has died."""
        status = self._end(worker)
        cause = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        self._line.send((worker.job, Failure("worker_died", f"the worker process ended with {cause}")))

    def _kill_overdue(self) -> None:
        deadline, now = self._setup.deadline_s, time.monotonic()
        if deadline is None:
            return
        for worker in [one for one in self._workers if one.job is not None and now - one.started >= deadline]:
            self._end(worker)
            self._line.send((worker.job, Failure("deadline", f"not done in deadline_s={deadline:g}")))

    def _next_deadline(self) -> float | None:
        """Seconds until a job is overdue; None if none can be."""
        started = [worker.started for worker in self._workers if worker.job is not None]
        if self._setup.deadline_s is None or not started:
            return None
        return max(0.0, min(started) + self._setup.deadline_s - time.monotonic())

    def _end(self, worker: Worker) -> int:
        """Kills a worker and the processes that it has started; returns its wait status."""
        self._workers.remove(worker)
        worker.line.close()
        for kill in (os.killpg, os.kill):  # its group exists once it has called setsid
            try:
                kill(worker.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return os.waitpid(worker.pid, 0)[1]

    def _fork(self) -> Worker:
        own, other = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                own.close()
                self._line.close()
                for sibling in self._workers:
                    sibling.line.close()
                work(Connection(other.detach()), self._term)
            finally:
                os._exit(1)
        other.close()
        worker = Worker(pid, Connection(own.detach()))
        self._workers.append(worker)
        return worker


def work(line: Connection, term: Term) -> None:
    """Runs the jobs that come over the line; does not return."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        try:
            _, responses, rows = line.recv()
        except EOFError:
            os._exit(0)
        found = score(term, responses, rows)
        try:
            line.send(found)
        except (TypeError, ValueError, AttributeError) as error:  # as pickle reports what it cannot send
            line.send(Failure(type(error).__name__, f"the value cannot be sent: {error}"))


def score(term: Term, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
    """What a term returns for responses; a `Failure` where it raises an error."""
    with catching() as caught:
        found = values_of(term, responses, rows)
        return asyncio.run(found) if term.awaits else found
    assert caught.failure is not None
    return replace(caught.failure, error=None)  # an error may be of a class that cannot be sent


def main() -> None:
    """Builds the term that the run names, and runs its jobs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the run ends the line when it is interrupted
    line = Connection(int(sys.argv[1]))
    setup: Setup = line.recv()
    try:
        if setup.module is not None:
            importlib.import_module(setup.module)
        term = build_term(setup.node, setup.key)
    except (ImportError, ValueError) as error:
        line.send(f"it could not build the term ({type(error).__name__}: {error})")
        return
    line.send(None)
    ForkServer(line, term, setup).serve()


if __name__ == "__main__":
    main()
