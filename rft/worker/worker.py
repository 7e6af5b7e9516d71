"""Worker processes: a deadline ends a call by killing its worker, and no call can end the run."""

import asyncio
import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from rft.worker.child_process import ChildProcess
from rft.worker.fork_server import HEAD, NUMBER, Work

ANSWER_S = 60.0  # seconds; a fork server that answers no request by then is ended
END_S = 5.0  # a fork server that does not end by then is killed
CHUNK = 2**18  # bytes that are read at once
LONGEST = 2**63  # bytes of an answer


class WorkerLost(OSError):
    """A worker has given no answer, and is ended.

    Attributes:
        reason: `deadline`, `worker_died`, `output` or `no_workers`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Worker:
    """A process that answers calls, one after another. Its calls belong to one event loop.

    Args:
        line: to the process.
        end: ends the process and all that it has started, and says how it ended. Its argument is whether the process
            has closed the line, so that it may end by itself.
        most: bytes of an answer.
    """

    def __init__(self, line: socket.socket, end: Callable[[bool], WorkerLost], most: int = LONGEST) -> None:
        line.setblocking(False)
        self._line = line
        self._end = end
        self._most = most

    @property
    def ended(self) -> bool:
        """Whether this process has ended it, after a call without an answer too."""
        return self._line.fileno() == -1

    @property
    def lost(self) -> bool:
        """Whether it has ended, or died. None of its calls is running."""
        try:
            return self._line.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def call(self, message: bytes, deadline_s: float | None) -> bytes:
        """The answer to a call; a worker that gives none is ended.

        Args:
            message: what the process reads, such as the pickled arguments of a `Work`.
            deadline_s: from now on; None: no limit.

        Raises:
            WorkerLost: the call missed the deadline, the answer is too long, or the process has ended.
        """
        loop, answer = asyncio.get_running_loop(), None
        try:
            async with asyncio.timeout(deadline_s):
                await loop.sock_sendall(self._line, message)
                size = int.from_bytes(await self._receive(HEAD))
                if size > self._most:
                    raise WorkerLost("output", f"it answers with {size} bytes, more than {self._most}")
                answer = await self._receive(size)
                return answer
        except WorkerLost:
            raise
        except TimeoutError as error:
            raise WorkerLost("deadline", f"the worker is silent for {deadline_s:g} s") from error
        except OSError as error:
            raise self.end(died=True) from error
        finally:
            if answer is None:  # also where the call is cancelled
                self.end()

    async def _receive(self, size: int) -> bytes:
        loop, data = asyncio.get_running_loop(), bytearray()
        while len(data) < size:
            part = await loop.sock_recv(self._line, min(size - len(data), CHUNK))
            if not part:
                raise ConnectionResetError("the process has closed its end")
            data += part
        return bytes(data)

    def end(self, died: bool = False) -> WorkerLost:
        """Ends the process and all that it has started; returns how it ended. A second call does nothing."""
        if self.ended:
            return WorkerLost("worker_died", "the worker has been ended")
        self._line.close()
        return self._end(died)


@dataclass(eq=False)
class ForkServer:
    """Forks workers by a process that prepares their work once; see `rft.worker.fork_server`. Any thread may use it.

    The process starts with the first worker, or by `start`, and anew after it has died or was closed.

    Attributes:
        title: what messages call it.
        prepare: returns the work; a function of a module, which the process imports.
        arguments: of `prepare`.
        environment: variables that are added to those of this process.
        start_s: seconds; a process that has not prepared the work by then does not answer.
        silent: what workers print is dropped.
        most: bytes of an answer.
    """

    title: str
    prepare: Callable[..., Work]
    arguments: tuple[Any, ...]
    environment: Mapping[str, str]
    _: KW_ONLY
    start_s: float
    silent: bool = False
    most: int = LONGEST

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # of a request and its answer
        self._process: ChildProcess | None = None
        self._line: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """The number of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process, unless it runs, and waits until it has prepared the work.

        Raises:
            ValueError: that of `prepare`.
            TimeoutError: it has not prepared the work in time.
            OSError: it has ended.
        """
        with self._lock:
            self._started()

    def fork(self) -> Worker:
        """A worker. Raises as `start`."""
        number = next(self._numbers)
        own, other = socket.socketpair()
        try:
            with other, self._lock:
                line = self._started()
                try:
                    socket.send_fds(line, [number.to_bytes(NUMBER)], [other.fileno()])
                except OSError as error:
                    raise self._lost(error, ANSWER_S) from error
        except (OSError, ValueError):
            own.close()
            raise
        return Worker(own, lambda died: self._end_worker(line, number), self.most)

    def close(self) -> None:
        """Ends the process and all workers. The next worker starts it again."""
        if (line := self._line) is not None:
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # so that a thread that waits for an answer leaves the lock
        with self._lock:
            self._end(END_S)

    def _started(self) -> socket.socket:
        """The line to the process, which is started unless it runs."""
        if self._line is not None:
            return self._line
        self._line, other = socket.socketpair()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with other:
            self._process = ChildProcess(
                [sys.executable, "-m", "rft.worker.fork_server", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                env={**os.environ, "PYTHONPATH": path, **self.environment},
            )
        line, ready = self._line, False
        try:
            line.settimeout(self.start_s)
            line.sendall(pickle.dumps((self.prepare, self.arguments, self.silent)))
            if problem := _receive(line, int.from_bytes(_receive(line, HEAD))):
                raise ValueError(problem.decode())
            line.settimeout(ANSWER_S)
            ready = True
            return line
        except OSError as error:
            raise self._lost(error, self.start_s) from error
        finally:
            if not ready:  # also where this thread is interrupted
                self._end(0)

    def _end_worker(self, line: socket.socket, number: int) -> WorkerLost:
        """Ends a worker; says how it ended."""
        with self._lock:
            if self._line is not line:
                return WorkerLost("no_workers", f"{self.title} has ended")
            try:
                line.sendall(number.to_bytes(NUMBER))
                status = int.from_bytes(_receive(line, NUMBER))
            except OSError as error:
                return WorkerLost("no_workers", str(self._lost(error, ANSWER_S)))
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
        return WorkerLost("worker_died", f"the worker process ended with {how}")

    def _lost(self, error: OSError, patience_s: float) -> OSError:
        """Ends the process, which does not answer; the error that says why."""
        if isinstance(error, TimeoutError):
            self._end(0)
            return TimeoutError(f"{self.title} has not answered within {patience_s:g} s")
        return OSError(f"{self.title} ended with status {self._end(END_S)}; see its error above")

    def _end(self, patience_s: float) -> int | None:
        """Ends the process, if there is one; its status."""
        process, line, self._process, self._line = self._process, self._line, None, None
        if line is not None:
            line.close()
        return None if process is None else process.end(patience_s)


def _receive(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = line.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side has closed its end")
        data += part
    return data
