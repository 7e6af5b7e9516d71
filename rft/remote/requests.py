"""What a router knows: servers, what they are asked that belongs together, and who works on it."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

from rft.remote.http_client import RequestFailed, ServerClient
from rft.rollout.server.server_api import Call, Sampled, ServerApi

PAUSES = (0.05, 5.0)  # seconds that a busy server is left alone: at first, at most


@dataclass(eq=False)
class Server:
    """A server as one rank knows it.

    Attributes:
        window: questions that it is given at once.
        running: questions that it works on.
        ready: it serves what is wanted, as far as is known.
        problem: why it is not.
        resting: until when, in the time of the loop, it is left alone.
        pause: seconds of its next rest.
        busy: since when it has said nothing but that it is busy, or None.
    """

    peer: ServerClient
    window: float
    running: int = 0
    ready: bool = False
    problem: str = "not asked yet"
    resting: float = 0.0
    pause: float = PAUSES[0]
    busy: float | None = None

    def answered(self, most: int) -> None:
        """Widens the window: by one when a whole window of answers has come."""
        self.window = min(float(most), self.window + 1 / self.window)
        self.pause, self.busy = PAUSES[0], None

    def rest(self, now: float) -> None:
        """Halves the window and leaves the server alone for a while; several refusals at once are one."""
        if self.resting <= now:
            self.window = max(1.0, self.window / 2)
            self.resting = now + self.pause
            self.pause = min(2 * self.pause, PAUSES[1])


class SampleRequest(Protocol):
    """What any of the servers can answer."""

    def call(self, peer: ServerClient) -> Call:
        """What asks this server."""
        ...

    def read(self, peer: ServerClient, answer: Any) -> Any:
        """What its answer says. May raise KeyError, IndexError, TypeError and ValueError: the answer is garbage.

        Raises:
            Failed: it is not what was asked for.
        """
        ...


@dataclass(frozen=True)
class SampleBatch:
    """Asks for a sample; see `SampleRequest`.

    Attributes:
        told: what a server is told.
        limit: cap on the tokens.
        dialect: of the servers.
        version: that the sample must be of.
    """

    told: Call
    limit: int
    server_api: ServerApi
    version: int

    def call(self, peer: ServerClient) -> Call:
        """The same for every server."""
        return self.told

    def read(self, peer: ServerClient, answer: Any) -> Sampled:
        """The sample."""
        sampled = self.server_api.parse(answer)
        length = len(sampled.tokens)
        if length > self.limit or (sampled.finish_reason == "length" and length < self.limit):
            said = f"{sampled.finish_reason} after {length} of {self.limit} tokens"
            raise ValueError(f"{said}: are prompt and answer longer than what rollout.engine_args allows?")
        if sampled.version != self.version:
            raise RequestFailed(f"{peer.name} serves version {sampled.version}, not {self.version}")
        return sampled


@dataclass(eq=False)
class Assignment:
    """A server at work on a group: since when, and how many answers it still owes."""

    since: float
    owes: int
    task: asyncio.Task[None]


@dataclass(eq=False)
class RequestGroup:
    """What one server is asked together, such as the samples of one prompt.

    Attributes:
        questions: each of them.
        found: the answers that have come, by their number.
        runs: who works on it.
        failed: how often which server has failed at it.
    """

    questions: list[SampleRequest]
    found: dict[int, Any] = field(default_factory=dict)
    runs: dict[Server, Assignment] = field(default_factory=dict)
    failed: Counter[Server] = field(default_factory=Counter)

    def missing(self) -> list[int]:
        """The answers that have not come."""
        return [number for number in range(len(self.questions)) if number not in self.found]
