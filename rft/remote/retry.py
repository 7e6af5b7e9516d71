"""What the clients of servers share: pauses between repeated calls, and the limits of requests to model servers."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from rft.ranges import NonNegativeInt, PositiveInt, Seconds

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


@dataclass(frozen=True)
class ServerPolicy:
    """Limits of the requests of one process to servers that may start, fail and come back while the run waits; the yaml
    documents each option.

    Attributes:
        concurrency: requests in flight at one server.
        retries: failures of a request, or of a group of requests, before the run fails.
        answer_s: deadline of one request, in seconds.
        start_s: deadline of a wait for a server that is ready, in seconds.
        poll_s: seconds between two probes of a server.
    """

    concurrency: PositiveInt
    retries: NonNegativeInt
    answer_s: Seconds
    start_s: Seconds
    poll_s: Seconds

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
