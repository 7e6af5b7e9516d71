"""Worker processes for a reward term: a deadline ends a call by killing its process, and no call can end the run."""

import asyncio
import importlib
import pickle
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rft.errors import prefixed
from rft.reward import REWARDS
from rft.reward.async_runners import AsyncRunner
from rft.reward.build import build_term
from rft.reward.runners import Rows
from rft.reward.term import Failure, Term, catching, values_of
from rft.worker.worker import ForkServer, Work, Worker, WorkerLost

START_S = 120.0  # a fork server that has not built the term by then does not answer


class WorkerPool(AsyncRunner):
    """The worker processes of one term. They start with the first calls and end with the run.

    A call without a value has a `Failure`. Its reason is that of a `WorkerLost`, or the type of the error that the
    function raised.

    Args:
        name, concurrency, deadline_s: see `AsyncRunner`; each call at the same time has a worker.
    """

    def __init__(self, name: str, concurrency: int, deadline_s: float | None) -> None:
        super().__init__(name, concurrency, deadline_s)
        self._idle: list[Worker] = []

    @abstractmethod
    def _start(self) -> Worker:
        """A new worker; raises an OSError or a ValueError if there can be none."""

    @abstractmethod
    async def _exchange(self, worker: Worker, job: bytes) -> tuple[Any, bool]:
        """What the term returned for the pickled responses and rows of a call, and whether the worker takes another."""

    async def _found(self, responses: Sequence[str], rows: Rows) -> Any:
        job = pickle.dumps((list(responses), list(rows)))
        while self._idle and self._idle[-1].lost:
            self._idle.pop().end()
        try:
            worker = self._idle.pop() if self._idle else await self._started()
        except WorkerLost as error:
            return Failure(error.reason, str(error))
        try:
            value, again = await self._exchange(worker, job)
        except WorkerLost as error:
            return self._late() if error.reason == "deadline" else Failure(error.reason, str(error))
        if again:
            self._idle.append(worker)
        else:
            worker.end()
        return value

    async def _started(self) -> Worker:
        """A new worker; raises a WorkerLost if there can be none."""
        try:
            return await asyncio.to_thread(self._start)
        except (OSError, ValueError) as error:
            raise WorkerLost("no_workers", str(error)) from error

    def close(self) -> None:
        super().close()
        while self._idle:
            self._idle.pop().end()


class ForkedPool(WorkerPool):
    """Workers that a fork server forks, which builds the term once.

    Args:
        name, concurrency, deadline_s: see `WorkerPool`.
        node, key: of the term in the yaml.
    """

    def __init__(
        self, name: str, node: Mapping[str, Any], key: str, concurrency: int, deadline_s: float | None
    ) -> None:
        super().__init__(name, concurrency, deadline_s)
        module = REWARDS.function(node["name"]).__module__ if "name" in node else None
        self._key = key
        given, title = (module, dict(node), key), f"the fork server of {key}"
        self._server = ForkServer(title, prepare_term, given, {"OMP_NUM_THREADS": "1"}, start_s=START_S)

    def _start(self) -> Worker:
        with prefixed(f"the fork server of {self._key} ended: "):
            return self._server.fork()

    async def _exchange(self, worker: Worker, job: bytes) -> tuple[Any, bool]:
        answer = await worker.call(job, self._deadline_s)
        try:
            return pickle.loads(answer), True
        except (pickle.UnpicklingError, AttributeError, ImportError) as error:
            return Failure("bad_answer", f"the run cannot read the value: {error}"), True

    def close(self) -> None:
        super().close()
        self._server.close()


def prepare_term(module: str | None, node: dict[str, Any], key: str) -> Work:
    """Builds a term; a worker then answers a call with the pickle of what the term returns.

    Args:
        module: registers the function of the term; None where no registry names it.
        node, key: of the term in the yaml.

    Raises:
        ValueError: the term cannot be built.
    """
    try:
        if module is not None:
            importlib.import_module(module)
        return partial(_pickled_score, build_term(node, key))
    except (ImportError, ValueError) as error:
        raise ValueError(f"it could not build the term ({type(error).__name__}: {error})") from error


def _pickled_score(term: Term, responses: Sequence[str], rows: Rows) -> bytes:
    values = score(term, responses, rows)
    try:
        return pickle.dumps(values)
    except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
        return pickle.dumps(Failure(type(error).__name__, f"the value cannot be sent: {error}"))


def score(term: Term, responses: Sequence[str], rows: Rows) -> Any:
    """What a term returns for responses; a `Failure` where it raises an error."""
    with catching() as caught:
        found = values_of(term, responses, rows)
        return asyncio.run(found) if term.awaits else found
    assert caught.failure is not None
    return replace(caught.failure, error=None)  # an error may be of a class that cannot be sent
