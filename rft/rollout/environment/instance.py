"""Where the object of an environment lives, in this process or in a worker of its own, and calls of its methods."""

import asyncio
import inspect
import json
import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from rft.batch.row_fields import own_copy
from rft.registry import Target
from rft.rollout.environment.hosted import Hosted, cut, host
from rft.waits import waiting
from rft.worker.worker import ForkServer, Worker, WorkerLost

LARGEST = 2**28  # bytes of an answer, beside its texts, which are cut
START_S = 1800.0  # seconds; a server that has not prepared the classes by then, which may load data, does not answer


class CallFailed(Exception):
    """A call of the user's code failed.

    Attributes:
        reason: the class of the error, or "deadline".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def call(name: str, function: Callable[[], Any], deadline_s: float | None) -> Any:
    """What a function returns; if that can be awaited, what it then returns.

    A thread cannot be ended: after the deadline its result is dropped, and it does not keep the process from ending.

    Args:
        name: of the function, for messages.

    Raises:
        CallFailed: the function raised an error or missed the deadline.
    """
    outcome: Future[tuple[Any, BaseException | None]] = Future()
    outcome.set_running_or_notify_cancel()  # a deadline does not cancel it, so that the thread can always set it

    def run() -> None:
        try:
            outcome.set_result((function(), None))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a function of the user may raise anything
            outcome.set_result((None, error))

    try:
        async with asyncio.timeout(deadline_s) as deadline:
            threading.Thread(target=run, daemon=True, name="environment").start()
            value, raised = await asyncio.wrap_future(outcome)
            if raised is not None:
                raise raised
            return await value if inspect.isawaitable(value) else value
    except TimeoutError as error:
        if deadline.expired():
            raise CallFailed("deadline", f"{name} did not end in {deadline_s:g} s") from error
        raise CallFailed("TimeoutError", f"{name} raised TimeoutError: {error}") from error
    except (Exception, SystemExit) as error:  # a function of the user may raise anything
        kind = type(error).__name__
        raise CallFailed(kind, f"{name} raised {kind}: {error}") from error


class LocalInstance:
    """The object of an environment in this process, for one episode. Every call has a thread, which cannot be ended at
    its deadline.

    Args:
        target: builds the object.

    Attributes:
        lost: whether its process has ended, so that no method can be called.
    """

    lost = False

    def __init__(self, target: Target) -> None:
        self._hosted = Hosted(target)

    async def call(self, method: str, *arguments: Any, deadline_s: float | None, most: int, **options: Any) -> Any:
        """What a method returns; `reset` builds the object first.

        Args:
            arguments, options: of the method.
            deadline_s: None for no limit.
            most: characters of a text that it returns; the rest is cut.

        Raises:
            CallFailed: the method raised an error or missed the deadline, or the object is lost.
        """
        arguments, options = own_copy((arguments, options))  # as a process would get them
        return cut(await call(method, partial(self._hosted.call, method, arguments, options), deadline_s), most)

    def end(self) -> None:
        """Does nothing: the object has no process of its own."""


class ProcessInstance:
    """The object of an environment in a worker, which a deadline ends. Calls at the same time wait for each other.

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
        """Whether the worker has ended, so that no method can be called."""
        return self._worker.ended

    async def call(self, method: str, *arguments: Any, deadline_s: float | None, most: int, **options: Any) -> Any:
        """What a method returns; arguments and errors are those of `LocalInstance.call`."""
        async with self._free:
            if self.lost:
                raise CallFailed("process_died", f"{method}: the process of the environment has ended")
            try:
                given = partial(pickle.dumps, (self._name, method, arguments, options, most))
                answer = await self._worker.call(await call(method, given, None), deadline_s)
                value, kind, message = await call(method, partial(json.loads, answer), None)
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
        """Ends the worker."""
        self._worker.end()


Instance = LocalInstance | ProcessInstance


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
