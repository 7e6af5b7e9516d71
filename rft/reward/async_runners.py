"""Where the calls of a reward term run beside the main thread: in threads or in an event loop.

`WorkerPool` is another.
"""

import asyncio
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from rft.remote.event_loop import EventLoop
from rft.reward.runners import Outcomes, Rows, Runner, call, outcomes
from rft.reward.term import Failure, Term, catching, values_of

T = TypeVar("T")


class ThreadRunner(Runner):
    """Runs the calls of a term that waits for other processes.

    Args:
        term: of the calls; `threads` of them run at the same time.
        name: of the term.
    """

    def __init__(self, term: Term, name: str) -> None:
        super().__init__()
        self._term = term
        self._name = name
        self._threads = ThreadPoolExecutor(term.threads, name)  # it starts threads as they are needed

    def _submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
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
        super().__init__()
        self._name = name
        self._concurrency = concurrency
        self._deadline_s = deadline_s
        self._slots = asyncio.Semaphore(concurrency)  # of the loop
        self._loop: EventLoop | None = None

    @abstractmethod
    async def _found(self, responses: Sequence[str], rows: Rows) -> Any:
        """What the term returns for the responses of a call; a `Failure` where it returns nothing."""

    def _submit(self, responses: Sequence[str], rows: Rows) -> Future[Outcomes]:
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
