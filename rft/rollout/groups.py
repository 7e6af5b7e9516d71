"""What a router knows: servers, the samples of a prompt, and who works on them."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from rft.rollout.dialect import Call, Sampled
from rft.rollout.peer import Peer

PAUSES = (0.05, 5.0)  # seconds that a busy server is left alone: at first, at most


@dataclass(eq=False)
class Server:
    """A server as one rank knows it.

    Attributes:
        window: samples that it is given at once.
        running: samples that it works on.
        ready: it serves the version that is wanted, as far as is known.
        problem: why it is not.
        resting: until when, in the time of the loop, it is left alone.
        pause: seconds of its next rest.
        busy: since when it has said nothing but that it is busy, or None.
    """

    peer: Peer
    window: float
    running: int = 0
    ready: bool = False
    problem: str = "not asked yet"
    resting: float = 0.0
    pause: float = PAUSES[0]
    busy: float | None = None

    def answered(self, most: int) -> None:
        """Widens the window: by one when a whole window of samples has come."""
        self.window = min(float(most), self.window + 1 / self.window)
        self.pause, self.busy = PAUSES[0], None

    def rest(self, now: float) -> None:
        """Halves the window and leaves the server alone for a while; several refusals at once are one."""
        if self.resting <= now:
            self.window = max(1.0, self.window / 2)
            self.resting = now + self.pause
            self.pause = min(2 * self.pause, PAUSES[1])


@dataclass(eq=False)
class Run:
    """A server at work on a group: since when, and how many samples it still owes."""

    since: float
    owes: int
    task: asyncio.Task[None]


@dataclass(eq=False)
class Group:
    """The samples of one prompt.

    Attributes:
        calls: what asks for each, and its cap on tokens.
        found: the samples that have come, by their number.
        runs: who works on it.
        failed: how often which server has failed at it.
    """

    calls: list[tuple[Call, int]]
    found: dict[int, Sampled] = field(default_factory=dict)
    runs: dict[Server, Run] = field(default_factory=dict)
    failed: Counter[Server] = field(default_factory=Counter)

    def missing(self) -> list[int]:
        """The samples that have not come."""
        return [number for number in range(len(self.calls)) if number not in self.found]
