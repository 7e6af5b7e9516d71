"""What rank zero does for servers: starts its own, brings all of them to the current weights, and again when they fail.

There is one rule: a server that is up and serves another version than the current one is given the current one. So a
new version, a server that was late, one that was started anew and one that somebody else started anew are one case.
While they are to sleep, one that is up is told to sleep, and the version that comes next wakes it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import Any

import torch

from rft.remote.http_client import LOOK_S, Failed, Garbage, Peer, Refused, waiting
from rft.remote.server_process import Process
from rft.rollout.server.options import Servers
from rft.rollout.server.server_api import Dialect
from rft.rollout.server.weight_broadcast import Line
from rft.rollout.server.weight_store import Weights


class Keeper:
    """One server, as rank zero looks after it.

    Attributes:
        serves: the version that it serves, None where that is not known.
        given: what it was given last. The same number may be of another run.
        problem: what was wrong at the last look.
        failures: looks that failed since it was told something new.
        refusals: of these, how often it was up and said no, since it was started anew for that.
        anew: it was started anew for that.
        asleep: it sleeps, and was well ever since.
        well: when it was well for the last time, or was started.
        line: to it, for weights that go through a process group.
    """

    def __init__(self, peer: Peer, process: Process | None, line: Line) -> None:
        self.peer = peer
        self.line = line
        self.process = process
        self.serves: int | None = None
        self.given: Weights | None = None
        self.problem = "not asked yet"
        self.failures = self.refusals = 0
        self.anew = self.asleep = False
        self.never_well = True
        self.well = time.monotonic()
        self.wake = asyncio.Event()

    def holds(self) -> Weights | None:
        """What it has in memory, None where that is not known."""
        return self.given if self.given is not None and self.given.version == self.serves else None


class Fleet:
    """All servers of a run.

    Args:
        dialect, peers, options: of the servers.
        processes: of those that are our own, one per peer; else empty.
        device: of this process.
    """

    def __init__(
        self, dialect: Dialect, peers: list[Peer], processes: list[Process], options: Servers, device: torch.device
    ) -> None:
        self._dialect = dialect
        self._options = options
        mine: list[Process | None] = [*processes] or [None] * len(peers)
        lines = [Line(peer, dialect.join, device, options) for peer in peers]
        self._keepers = [Keeper(*theirs) for theirs in zip(peers, mine, lines, strict=True)]
        self._current: Weights | None = None
        self._asleep = False
        self._committed: Weights | None = None
        self._news = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []

    async def watch(self) -> None:
        """Looks after all servers from now on."""
        self._watching = [asyncio.create_task(self._keep(keeper)) for keeper in self._keepers]

    async def stop(self) -> None:
        """Looks no longer."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for keeper in self._keepers:
            keeper.line.part()

    def sent(self) -> int:
        """Bytes of weights that have gone to servers through process groups."""
        return sum(keeper.line.sent() for keeper in self._keepers)

    def well(self) -> int:
        """How many servers serve the current version."""
        return len(self._keepers) - len(self._behind())

    async def commit(self, weights: Weights) -> None:
        """Makes a version the current one and waits until the servers acknowledge it.

        The first time all of them must. Later a server that fails is left behind, as long as there is another; it gets
        the version that is current when it is back.

        Raises:
            OSError: no server acknowledges the version, or, the first time, one does not; names them.
        """
        self._current, self._asleep = weights, False
        await self._reach(f"acknowledge version {weights.version}")
        self._committed = weights

    async def sleep(self) -> None:
        """Has servers give memory back until the next version. One that fails keeps it, as long as there is another.

        Raises:
            OSError: no server goes to sleep; names them.
        """
        self._asleep = True
        await self._reach("go to sleep")

    async def _reach(self, what: str) -> None:
        for keeper in self._keepers:
            keeper.failures = keeper.refusals = 0
            keeper.anew = False
            keeper.wake.set()
        try:
            deadline = self._options.sync_s + self._options.start_s
            async with waiting(lambda: f"rank 0 waits for {self._names()} to {what} ({self._problems()})", deadline):
                while not self._settled():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            if self._committed is None or len(self._behind()) == len(self._keepers):
                raise
        if self._behind():
            logging.getLogger(__name__).warning(
                "%s did not %s and is left behind until it does (%s)", self._names(), what, self._problems()
            )

    def _settled(self) -> bool:
        for task in self._watching:
            if task.done():
                task.result()  # it ends by an error of the program alone
        behind = self._behind()
        if self._committed is None:
            for keeper in behind:
                if keeper.never_well and keeper.process is not None and (ended := keeper.process.ended()):
                    raise Failed(f"{keeper.peer.name} {ended}")
                if keeper.refusals > self._options.retries:
                    raise Failed(keeper.problem)
            return not behind
        if all(self._unwilling(keeper) for keeper in self._keepers):
            raise Failed(self._problems())
        lost = [keeper for keeper in behind if keeper.failures > self._options.retries]
        return not behind or len(behind) == len(lost) < len(self._keepers)

    def _unwilling(self, keeper: Keeper) -> bool:
        """True where it says no for good: one of our own after it was started anew, too."""
        return keeper.refusals > self._options.retries and (keeper.process is None or keeper.anew)

    def _behind(self) -> list[Keeper]:
        if self._asleep:
            return [keeper for keeper in self._keepers if not keeper.asleep]
        assert self._current is not None
        now = (self._current, self._current.version)
        return [keeper for keeper in self._keepers if (keeper.given, keeper.serves) != now]

    def _names(self) -> str:
        return ", ".join(keeper.peer.name for keeper in self._behind())

    def _problems(self) -> str:
        return "; ".join(keeper.problem for keeper in self._behind())

    async def _keep(self, keeper: Keeper) -> None:
        while True:
            keeper.wake.clear()
            try:
                await self._look(keeper)
                keeper.failures = 0
            except OSError as error:
                if keeper.serves is not None:
                    logging.getLogger(__name__).warning("%s is down: %s", keeper.peer.name, error)
                keeper.line.part()
                keeper.serves, keeper.asleep, keeper.problem = None, False, str(error)
                keeper.failures += 1 + isinstance(error, TimeoutError) * self._options.retries
            finally:
                self._news.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_s):
                    await keeper.wake.wait()

    async def _look(self, keeper: Keeper) -> None:
        """Brings a server to the current version, or to sleep, where it is not.

        Raises:
            OSError: it is not well.
        """
        if keeper.process is not None:
            await self._revive(keeper, keeper.process)
        keeper.serves = await self._ask(keeper)
        peer, weights = keeper.peer, self._current
        if self._asleep:
            if not keeper.asleep:
                await self._tell(keeper, "go to sleep", self._dialect.sleep(peer))
                keeper.asleep = True
        elif weights is not None and (keeper.given is not weights or keeper.serves != weights.version):
            if keeper.failures or weights is self._committed:  # else they have been read back just now
                await asyncio.to_thread(weights.verify)
            await self._tell(keeper, f"acknowledge version {weights.version}", self._load(keeper, weights))
            keeper.serves, keeper.asleep = await self._ask(keeper), False
            if keeper.serves != weights.version:
                raise Failed(f"{peer.name} was given version {weights.version} and serves {keeper.serves}")
            keeper.given = weights
        keeper.never_well, keeper.refusals, keeper.well = False, 0, time.monotonic()
        if keeper.process is not None:
            keeper.process.calm()

    async def _tell(self, keeper: Keeper, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            with keeper.peer.sense("what it says when it is told something new"):
                async with waiting(f"rank 0 waits for {keeper.peer.name} to {what}", self._options.sync_s):
                    await work
        except (Garbage, Refused) as error:
            keeper.refusals += not error.busy
            raise

    async def _load(self, keeper: Keeper, weights: Weights) -> None:
        before, group = keeper.holds(), self._options.transport == "group"
        fresh = before is None and not keeper.asleep
        channel = await keeper.line.channel(fresh) if group else None
        await self._dialect.load(keeper.peer, weights, before, channel)

    async def _ask(self, keeper: Keeper) -> int | None:
        """The version of a server that is up."""
        what = f"rank 0 waits for {keeper.peer.name} to say how it is"
        with keeper.peer.sense("what it says of itself"):
            async with waiting(what, min(LOOK_S, self._options.sync_s)):
                await self._dialect.healthy(keeper.peer)
                return await self._dialect.version(keeper.peer)

    async def _revive(self, keeper: Keeper, process: Process) -> None:
        """Starts a process anew that has ended, says no, or has not been well for as long as a start may take."""
        ended, now = process.ended(), time.monotonic()
        if ended:
            if keeper.never_well or now < process.again:
                raise Failed(f"{keeper.peer.name} {ended}")
        else:
            unwilling = keeper.refusals > self._options.retries and not keeper.anew
            if now - keeper.well < self._options.start_s and not unwilling:
                return
            ended = f"has not been well for {now - keeper.well:.0f} s: {keeper.problem}"
            keeper.refusals, keeper.anew = 0, unwilling
            process.end()
            await asyncio.to_thread(process.wait)
        logging.getLogger(__name__).warning("%s is started anew: it %s", keeper.peer.name, ended)
        process.start()
        keeper.well = time.monotonic()
