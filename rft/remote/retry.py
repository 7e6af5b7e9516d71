"""What the clients of servers share: pauses between repeated calls, and when servers get requests, and how many."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from rft.ranges import NonNegativeInt, PositiveInt, Seconds


class Backoff:
    """Pauses that double from `first_s` to `longest_s` seconds, until `reset`; `clock` returns the time in seconds."""

    def __init__(self, first_s: float, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first = self._next = first_s
        self._longest = longest_s
        self._clock = clock
        self._until = clock()

    def next(self) -> float:
        """Seconds of the pause that comes now."""
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause

    def start(self) -> None:
        """The pause that comes now starts, also where another one has not ended."""
        self._until = self._clock() + self.next()

    @property
    def pausing(self) -> bool:
        """A pause has started and not ended."""
        return self._clock() < self._until

    def reset(self) -> None:
        """The next pause is the shortest; one that has started lasts as long as before."""
        self._next = self._first


@dataclass
class BreakerOptions:
    """When a server gets no requests.

    Attributes:
        failures: in a row, after which the circuit of a server is open: it gets no requests.
        pause_s: seconds until one request probes it; they double with each probe that fails.
    """

    failures: PositiveInt
    pause_s: Seconds


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
