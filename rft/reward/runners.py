"""Where the calls of a reward term run: in the main thread, in an event loop or in threads. `WorkerPool` is another."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, TypeVar

from rft.errors import FunctionError, naming
from rft.remote.event_loop import EventLoop
from rft.reward.term import Failure, RowTerm, Term, Unscored, catching, is_tensor, values_of

T = TypeVar("T")
Rows = Sequence[Mapping[str, Any]]
Outcomes = list[Any]  # of the responses of one call: a value, or `Unscored`


class Runner(ABC):
    """Runs the calls of one term.

    Attributes:
        beside: calls run while the main thread does other work, so they may start before all responses are sampled.
    """

    beside: ClassVar[bool] = True

    @abstractmethod
    def submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
        """Starts one call; in an event loop or in a worker it ends where its future is cancelled. Any thread may call
        this, one at a time."""

    def close(self) -> None:
        """Ends the threads and processes."""


class InlineRunner(Runner):
    """Runs a call at once, in the thread that submits it.

    Args:
        term: of the calls.
        name: of the term.
    """

    beside: ClassVar[bool] = False

    def __init__(self, term: Term, name: str) -> None:
        self._term = term
        self._name = name

    def submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
        done: Future[Outcomes] = Future()
        done.set_result(call(self._term, self._name, responses, rows))
        return done


class ThreadRunner(Runner):
    """Runs the calls of a term that waits for other processes.

    Args:
        term: of the calls; `threads` of them run at the same time.
        name: of the term.
    """

    def __init__(self, term: Term, name: str) -> None:
        self._term = term
        self._name = name
        self._threads = ThreadPoolExecutor(term.threads, name)  # it starts threads as they are needed

    def submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
        return self._threads.submit(call, self._term, self._name, responses, rows)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class AsyncRunner(Runner):
    """Runs calls in an event loop, which starts with the first call, also after `close`.

    Args:
        name: of the term.
        concurrency: calls at the same time.
        deadline_s: seconds of one call from its start; None: no limit.
    """

    def __init__(self, name: str, concurrency: int, deadline_s: float | None) -> None:
        self._name = name
        self._concurrency = concurrency
        self._deadline_s = deadline_s
        self._slots = asyncio.Semaphore(concurrency)  # of the loop
        self._loop: EventLoop | None = None

    @abstractmethod
    async def _found(self, responses: Sequence[str], rows: Rows) -> Any:
        """What the term returns for the responses of a call; a `Failure` where it returns nothing."""

    def submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
        return self._begin(self._call(responses, rows))

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._loop is None:
            self._loop, self._slots = EventLoop(f"reward {self._name}"), asyncio.Semaphore(self._concurrency)
        return self._loop.submit(work)

    async def _call(self, responses: Sequence[str], rows: Rows) -> Outcomes:
        async with self._slots:
            returned = await self._found(responses, rows)
        return outcomes(returned, responses, self._name)

    def _late(self) -> Failure:
        return Failure("deadline", f"not done in deadline_s={self._deadline_s:g}")

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()
            self._loop = None


class LoopRunner(AsyncRunner):
    """Runs the calls of a term that awaits.

    Args:
        term: of the calls.
        name, concurrency, deadline_s: see `AsyncRunner`.
    """

    def __init__(self, term: Term, name: str, concurrency: int, deadline_s: float | None) -> None:
        super().__init__(name, concurrency, deadline_s)
        self._term = term

    async def _found(self, responses: Sequence[str], rows: Rows) -> Any:
        returned: Any = None
        with catching() as caught:
            async with asyncio.timeout(self._deadline_s) as limit:
                returned = await values_of(self._term, responses, rows)
        return self._late() if limit.expired() else caught.failure or returned


def call(term: Term, name: str, responses: Sequence[str], rows: Rows) -> Outcomes:
    """The outcomes of one call in this process; arguments and errors as in `outcomes`."""
    returned: Any = None
    with catching() as caught:
        if isinstance(term, RowTerm):  # its function names itself in an error
            returned = values_of(term, responses, rows)
        else:
            with naming(f"the reward term {name!r}", type(term).values):
                returned = values_of(term, responses, rows)
    return outcomes(caught.failure or returned, responses, name)


def outcomes(found: Any, responses: Sequence[str], name: str) -> Outcomes:
    """One outcome for each response of a call.

    Args:
        found: what the term returned, or a `Failure` of the call.
        responses: of the call.
        name: of the term.

    Raises:
        FunctionError: the term returned more or fewer values than there are responses.
    """
    if isinstance(found, Unscored):
        return [found] * len(responses)
    several = is_tensor(found) or (isinstance(found, Sequence) and not isinstance(found, str))
    values = list(found) if several else [found]
    if len(values) != len(responses):
        raise FunctionError(f"the reward term {name!r} gave {len(values)} scores for {len(responses)} responses")
    return values
