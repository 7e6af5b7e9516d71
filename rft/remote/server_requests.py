"""What a load balancer distributes: requests to servers, in groups and rounds."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rft.remote.http_client import ServerClient
from rft.remote.retry import Backoff

PAUSES_S = (0.05, 5.0)  # the shortest and the longest pause of a busy server


class Call(NamedTuple):
    """A POST: path and JSON body."""

    path: str
    body: dict[str, Any]


@dataclass(eq=False)
class Server:
    """What one rank knows of a server.

    Attributes:
        client: sends requests to it.
        window: requests that it gets at once.
        running: requests that it works on.
        ready: its last probe succeeded, and no request has failed since.
        problem: why it is not ready.
        backoff: its pauses, in which it gets no requests.
        busy_since: the time of its first refusal since its last answer, or None.
    """

    client: ServerClient
    window: float
    running: int = 0
    ready: bool = False
    problem: str = "not probed yet"
    backoff: Backoff = field(default_factory=lambda: Backoff(*PAUSES_S))
    busy_since: float | None = None

    def answered(self, most: int) -> None:
        """Widens the window by one per window of answers, up to `most`, and ends the backoff."""
        self.window = min(float(most), self.window + 1 / self.window)
        self.backoff.reset()
        self.busy_since = None

    def rest(self) -> None:
        """Halves the window and pauses the server; refusals during a pause count once."""
        if not self.backoff.pausing:
            self.window = max(1.0, self.window / 2)
            self.backoff.start()


class ServerRequest(Protocol):
    """A request that every server of a run can answer."""

    def call(self, client: ServerClient) -> Call:
        """The POST for this server."""
        ...

    def read(self, client: ServerClient, answer: Any) -> Any:
        """The result in a parsed JSON response; a `Continued` where the server has answered a part of the request.

        Raises:
            KeyError, IndexError, TypeError, ValueError: the response is malformed.
            RequestFailed: the response is valid but must not be used, such as a stale one.
        """
        ...


@dataclass(frozen=True)
class Continued:
    """A request of which a server has answered a part.

    Attributes:
        request: for the rest; its result is that of the whole.
    """

    request: ServerRequest


@dataclass(eq=False)
class Round:
    """Groups that are wanted together.

    Attributes:
        total: requests of all groups.
        order: groups of a round of lower order are handed out first, and of the same order in the order of the calls.
        on_result: see `LoadBalancer.run`.
        ended: gets the error that ends the round, or None once all results are taken.
        done: requests with a result.
        groups: those that have requests.
    """

    total: int
    order: int
    on_result: Callable[[int, int, Any], None] | None
    ended: asyncio.Future[None]
    done: int = 0
    groups: list["RequestGroup"] = field(default_factory=list)

    def end(self, error: BaseException | None = None) -> None:
        """Ends the round; the first end counts."""
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


@dataclass(eq=False)
class Assignment:
    """A group at a server.

    Attributes:
        since: when the server got it, in time of the event loop.
        outstanding: requests without an answer.
        task: sends the requests.
    """

    since: float
    outstanding: int
    task: asyncio.Task[None]


@dataclass(eq=False)
class RequestGroup:
    """Requests that go to one server together, such as the samples of one prompt.

    Attributes:
        round: that wants the results.
        number: of the group in its round.
        requests: all of them; one that a server has answered in part is replaced by the one for the rest.
        results: those that have arrived, by position.
        assignments: the servers that work on the group.
        failures: how often each server failed at the group.
    """

    round: Round
    number: int
    requests: list[ServerRequest]
    results: dict[int, Any] = field(default_factory=dict)
    assignments: dict[Server, Assignment] = field(default_factory=dict)
    failures: Counter[Server] = field(default_factory=Counter)

    def missing(self) -> list[int]:
        """Positions without a result."""
        return [number for number in range(len(self.requests)) if number not in self.results]
