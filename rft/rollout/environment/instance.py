"""Where the object of an environment lives: in this process, or in a worker of its own."""

import asyncio
import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from rft.batch.row_fields import own_copy
from rft.registry import Target
from rft.rollout.environment.calls import CallFailed, call
from rft.rollout.environment.hosted import Hosted, cut, host
from rft.waits import waiting
from rft.worker.worker import ForkServer, Worker, WorkerLost

LARGEST = 2**28  # bytes of an answer, beside its texts, which are cut
START_S = 1800.0  # seconds; a server that has not prepared the classes by then, which may load data, does not answer


class Instance(ABC):
    """The object of an environment, for one episode."""

    @property
    def lost(self) -> bool:
        """Whether its process has ended, so that no method can be called."""
        return False

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
    """An object of a worker, which a deadline ends. Calls at the same time wait for each other.

    Args:
        name: of the class.
        worker: has the object.
    """

    def __init__(self, name: str, worker: Worker) -> None:
        self._name = name
        self._worker = worker
        self._free = asyncio.Lock()

    @property
    def lost(self) -> bool:
        """See `Instance.lost`."""
        return self._worker.ended

    async def call(self, method: str, *arguments: Any, deadline_s: float | None, most: int, **options: Any) -> Any:
        """See `Instance.call`."""
        async with self._free:
            if self.lost:
                raise CallFailed("process_died", f"{method}: the process of the environment has ended")
            try:
                given = partial(pickle.dumps, (self._name, method, arguments, options, most))
                answer = await self._worker.call(await call(method, given, None), deadline_s)
                value, kind, message = await call(method, partial(_read, answer), None)
            except WorkerLost as error:
                if error.reason == "deadline":
                    raise CallFailed("deadline", f"{method} did not end in {deadline_s:g} s") from error
                raise CallFailed("process_died", f"{method}: the process of the environment has died") from error
            except CallFailed:  # what it gets or answers cannot be read
                self.end()
                raise
        if kind is not None:
            raise CallFailed(kind, f"{method} raised {kind}: {message}")
        return value

    def end(self) -> None:
        """See `Instance.end`."""
        self._worker.end()


def _read(answer: bytes) -> tuple[Any, str | None, str]:
    value, kind, message = json.loads(answer)
    return value, kind, message


class Processes:
    """Forks a worker for every environment, by a fork server that starts with the first one.

    Args:
        nodes: the yaml nodes of the classes, by name.
    """

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self._names = ", ".join(nodes)
        self._server = ForkServer(
            "the fork server of environments", host, (dict(nodes),), {"OMP_NUM_THREADS": "1"},
            start_s=START_S, silent=True, most=LARGEST,
        )  # fmt: skip

    def fork(self, name: str) -> ProcessInstance:
        """A worker for an environment of the class of this name. Raises as `start`."""
        self.start()
        return ProcessInstance(name, self._server.fork())

    def start(self) -> None:
        """Starts the server, unless it runs.

        Raises:
            ValueError: a class cannot be prepared; names the key.
            OSError: the server has ended, or has not prepared the classes within `START_S` seconds.
        """
        if self._server.pid is not None:
            return
        try:
            with waiting(
                f"the run waits for the fork server of environments, which prepares the classes {self._names}"
            ):
                self._server.start()
        except TimeoutError as error:
            raise OSError(
                f"environment.classes: the fork server has not prepared {self._names} within {START_S:g} s; prepare "
                "data that it loads before the run"
            ) from error

    def close(self) -> None:
        """Ends the server and all workers."""
        self._server.close()
