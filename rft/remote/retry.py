"""The retry policy that engines, teachers and judges share: concurrency, deadlines, repeated calls, pauses."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from rft.ranges import NonNegativeInt, PositiveInt, Seconds
from rft.remote.http_client import RequestFailed

T = TypeVar("T")


class Backoff:
    """Pauses that double from `first_s` to `longest_s` seconds, until `reset`."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first = self._next = first_s
        self._longest = longest_s

    def next(self) -> float:
        """Seconds of the pause that comes now."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause

    def reset(self) -> None:
        """Starts again with the shortest pause."""
        self._next = self._first


@dataclass
class RetryPolicy:
    """Limits of the requests of one process; the yaml documents each option.

    Attributes:
        concurrency: requests in flight at one server.
        retries: failures of a request, or of a group of requests, before the run fails.
        answer_s: deadline of one request, in seconds.
    """

    concurrency: PositiveInt
    retries: NonNegativeInt
    answer_s: Seconds

    async def within_deadline(self, what: str, call: Awaitable[T]) -> T:
        """Awaits one request.

        Args:
            what: who waits for what, for the message.

        Raises:
            TimeoutError: there is no answer after `answer_s` seconds; names the wait.
        """
        try:
            async with asyncio.timeout(self.answer_s):
                return await call
        except TimeoutError as error:
            raise TimeoutError(f"{what}, {self.answer_s:g} s") from error

    async def repeat(self, what: str, request: Callable[[], Awaitable[T]], backoff: Backoff) -> T:
        """Sends a request until it succeeds, at most `retries` + 1 times.

        Args:
            what: who waits for what, for the message.
            request: sends the request and reads the response.
            backoff: the pauses after failures.

        Raises:
            RequestFailed: the last failure, which may be one that a repetition does not cure; names the server.
        """
        for attempt in range(1, self.retries + 2):
            try:
                return await self.within_deadline(what, request())
            except (RequestFailed, TimeoutError) as error:
                cured_by_time = not isinstance(error, RequestFailed) or error.transient
                if attempt > self.retries or not cured_by_time:
                    raise RequestFailed(f"{error} (call {attempt} of {self.retries + 1})") from error
            await asyncio.sleep(backoff.next())
        raise AssertionError("a policy allows at least one call")


@dataclass
class ServerPolicy(RetryPolicy):
    """The limits for servers that may start, fail and come back while the run waits.

    Attributes:
        start_s: deadline of a wait for a server that is ready, in seconds.
        poll_s: seconds between two probes of a server.
    """

    start_s: Seconds
    poll_s: Seconds
