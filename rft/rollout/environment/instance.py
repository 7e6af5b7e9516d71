"""Where the object of an environment lives: in this process, or in a process of its own."""

import array
import asyncio
import json
import os
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from rft.batch.entries import own_copy
from rft.registry import Target
from rft.rollout.environment.calls import CallFailed, call
from rft.rollout.environment.fork_server import LONGEST, READY, Hosted, cut
from rft.waits import waiting
from rft.worker.child_process import ChildProcess

LARGEST = 2**28  # bytes of an answer, beside its texts, which are cut
START_S = 1800.0  # seconds; a server that has not prepared the classes by then, which may load data, does not answer
SEND_S = 60.0  # nor does one that takes no message for so long
END_S = 5.0  # a server that does not end by then is killed


class Instance(ABC):
    """The object of an environment, for one episode.

    Attributes:
        lost: its process has ended, and no method can be called.
    """

    lost = False

    @abstractmethod
    async def call(self, method: str, *arguments: Any, deadline_s: float | None, most: int, **options: Any) -> Any:
        """What a method returns; `reset` builds the object first.

        Args:
            arguments, options: of the method.
            deadline_s: None for no limit.
            most: characters of a text that it returns; the rest is cut.

        Raises:
            CallFailed: the method raised an error or missed the deadline, or the object is lost.
        """

    def end(self) -> None:
        """Ends its process, if it has one."""


class LocalInstance(Instance):
    """An object of this process. Every call has a thread, which cannot be ended at its deadline.

    Args:
        target: builds the object.
    """

    def __init__(self, target: Target) -> None:
        self._hosted = Hosted(target)

    async def call(self, method: str, *arguments: Any, deadline_s: float | None, most: int, **options: Any) -> Any:
        """See `Instance.call`."""
        arguments, options = own_copy((arguments, options))  # as a process would get them
        return cut(await call(method, partial(self._hosted.call, method, arguments, options), deadline_s), most)


class ProcessInstance(Instance):
    """An object of a forked process, which a deadline ends. Calls at the same time wait for each other.

    Args:
        line: to the process.
    """

    def __init__(self, line: Connection) -> None:
        self._line = line
        self._free = asyncio.Lock()

    async def call(self, method: str, *arguments: Any, deadline_s: float | None, most: int, **options: Any) -> Any:
        """See `Instance.call`."""
        send = partial(self._line.send, (method, arguments, options, most))
        async with self._free:
            if self.lost:
                raise CallFailed("process_died", f"{method}: the process of the environment has ended")
            try:
                await call(method, send, deadline_s)
                found = await call(method, self._receive, deadline_s) if await self._answers(deadline_s) else None
            except CallFailed as error:
                self.end()
                if error.reason in ("EOFError", "ConnectionResetError", "BrokenPipeError"):
                    message = f"{method}: the process of the environment has died"
                    raise CallFailed("process_died", message) from error
                raise
        if found is None:
            self.end()
            raise CallFailed("deadline", f"{method} did not end in {deadline_s:g} s")
        value, kind, message = found
        if kind is not None:
            raise CallFailed(kind, f"{method} raised {kind}: {message}")
        return value

    def _receive(self) -> Any:
        return json.loads(self._line.recv_bytes(LARGEST))

    async def _answers(self, deadline_s: float | None) -> bool:
        """Whether the process answers or ends before the deadline. No thread waits for it: agents take long."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        descriptor = self._line.fileno()
        loop.add_reader(descriptor, ready.set)
        try:
            await asyncio.wait_for(ready.wait(), deadline_s)
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(descriptor)
        return True

    def end(self) -> None:
        """See `Instance.end`: the process ends with its line."""
        if not self.lost:
            self.lost = True
            with socket.socket(fileno=os.dup(self._line.fileno())) as line, suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # ends a thread that still sends or receives after its deadline
            self._line.close()


class Processes:
    """Forks a process for every environment, by a server that starts with the first one.

    Args:
        nodes: the yaml nodes of the classes, by name.
    """

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self._nodes = dict(nodes)
        self._server: tuple[ChildProcess, socket.socket] | None = None

    def fork(self, name: str) -> ProcessInstance:
        """A process for an environment of the class of this name. Raises as `start`."""
        _, line = self.start()
        own, other = socket.socketpair()
        descriptor = array.array("i", [other.fileno()])
        try:
            line.sendmsg([name.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
        except TimeoutError as error:
            own.close()
            raise OSError(f"the fork server of environments has taken no message for {SEND_S:g} s") from error
        finally:
            other.close()
        return ProcessInstance(Connection(own.detach()))

    def start(self) -> tuple[ChildProcess, socket.socket]:
        """Starts the server, unless it runs; returns it and the line to it.

        Raises:
            ValueError: the object of an agent cannot be built; names the key.
            OSError: the server has ended, or has not prepared the classes within `START_S` seconds.
        """
        if self._server is not None:
            return self._server
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the bounds of messages
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        server = ChildProcess(
            [sys.executable, "-m", "rft.rollout.environment.fork_server", str(other.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        own.settimeout(START_S)
        own.send(json.dumps(self._nodes).encode())
        other.close()
        names = ", ".join(self._nodes)
        try:
            with waiting(f"the run waits for the fork server of environments, which prepares the classes {names}"):
                said = own.recv(LONGEST)
        except TimeoutError as error:
            own.close()
            server.end(0)
            raise OSError(
                f"environment.classes: the fork server has not prepared {names} within {START_S:g} s; prepare data "
                "that it loads before the run"
            ) from error
        if said != READY:
            own.close()
            status = server.end(END_S)
            if said:
                raise ValueError(said.decode())
            raise OSError(f"the fork server of environments ended with status {status}; see its error above")
        own.settimeout(SEND_S)
        self._server = server, own
        return self._server

    def close(self) -> None:
        """Ends the server and all processes."""
        if self._server is not None:
            server, line = self._server
            line.close()
            server.end(END_S)
            self._server = None
