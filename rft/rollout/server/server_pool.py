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

from rft.remote.http_client import LOOK_S, BadResponse, RequestFailed, RequestRefused, ServerClient, deadline
from rft.remote.server_process import ServerProcess
from rft.rollout.server.options import Servers
from rft.rollout.server.server_api import ServerApi
from rft.rollout.server.weight_broadcast import Connection
from rft.rollout.server.weight_store import WeightVersion


class ServerMonitor:
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

    def __init__(self, peer: ServerClient, process: ServerProcess | None, line: Connection) -> None:
        self.peer = peer
        self.line = line
        self.process = process
        self.serves: int | None = None
        self.given: WeightVersion | None = None
        self.problem = "not asked yet"
        self.failures = self.refusals = 0
        self.anew = self.asleep = False
        self.never_well = True
        self.well = time.monotonic()
        self.wake = asyncio.Event()

    def holds(self) -> WeightVersion | None:
        """What it has in memory, None where that is not known."""
        return self.given if self.given is not None and self.given.version == self.serves else None


class ServerPool:
    """All servers of a run.

    Args:
        dialect, peers, options: of the servers.
        processes: of those that are our own, one per peer; else empty.
        device: of this process.
    """

    def __init__(
        self,
        server_api: ServerApi,
        peers: list[ServerClient],
        processes: list[ServerProcess],
        options: Servers,
        device: torch.device,
    ) -> None:
        self._server_api = server_api
        self._options = options
        mine: list[ServerProcess | None] = [*processes] or [None] * len(peers)
        lines = [Connection(peer, server_api.join, device, options) for peer in peers]
        self._monitors = [ServerMonitor(*theirs) for theirs in zip(peers, mine, lines, strict=True)]
        self._current: WeightVersion | None = None
        self._asleep = False
        self._committed: WeightVersion | None = None
        self._news = asyncio.Event()
        self._watching: list[asyncio.Task[None]] = []

    async def watch(self) -> None:
        """Looks after all servers from now on."""
        self._watching = [asyncio.create_task(self._keep(monitor)) for monitor in self._monitors]

    async def stop(self) -> None:
        """Looks no longer."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for monitor in self._monitors:
            monitor.line.part()

    def sent(self) -> int:
        """Bytes of weights that have gone to servers through process groups."""
        return sum(monitor.line.sent() for monitor in self._monitors)

    def well(self) -> int:
        """How many servers serve the current version."""
        return len(self._monitors) - len(self._behind())

    async def commit(self, weights: WeightVersion) -> None:
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
        for monitor in self._monitors:
            monitor.failures = monitor.refusals = 0
            monitor.anew = False
            monitor.wake.set()
        try:
            limit = self._options.sync_s + self._options.start_s
            async with deadline(lambda: f"rank 0 waits for {self._names()} to {what} ({self._problems()})", limit):
                while not self._settled():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            if self._committed is None or len(self._behind()) == len(self._monitors):
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
            for monitor in behind:
                if monitor.never_well and monitor.process is not None and (ended := monitor.process.ended()):
                    raise RequestFailed(f"{monitor.peer.name} {ended}")
                if monitor.refusals > self._options.retries:
                    raise RequestFailed(monitor.problem)
            return not behind
        if all(self._unwilling(monitor) for monitor in self._monitors):
            raise RequestFailed(self._problems())
        lost = [monitor for monitor in behind if monitor.failures > self._options.retries]
        return not behind or len(behind) == len(lost) < len(self._monitors)

    def _unwilling(self, monitor: ServerMonitor) -> bool:
        """True where it says no for good: one of our own after it was started anew, too."""
        return monitor.refusals > self._options.retries and (monitor.process is None or monitor.anew)

    def _behind(self) -> list[ServerMonitor]:
        if self._asleep:
            return [monitor for monitor in self._monitors if not monitor.asleep]
        assert self._current is not None
        now = (self._current, self._current.version)
        return [monitor for monitor in self._monitors if (monitor.given, monitor.serves) != now]

    def _names(self) -> str:
        return ", ".join(monitor.peer.name for monitor in self._behind())

    def _problems(self) -> str:
        return "; ".join(monitor.problem for monitor in self._behind())

    async def _keep(self, monitor: ServerMonitor) -> None:
        while True:
            monitor.wake.clear()
            try:
                await self._look(monitor)
                monitor.failures = 0
            except OSError as error:
                if monitor.serves is not None:
                    logging.getLogger(__name__).warning("%s is down: %s", monitor.peer.name, error)
                monitor.line.part()
                monitor.serves, monitor.asleep, monitor.problem = None, False, str(error)
                monitor.failures += 1 + isinstance(error, TimeoutError) * self._options.retries
            finally:
                self._news.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_s):
                    await monitor.wake.wait()

    async def _look(self, monitor: ServerMonitor) -> None:
        """Brings a server to the current version, or to sleep, where it is not.

        Raises:
            OSError: it is not well.
        """
        if monitor.process is not None:
            await self._revive(monitor, monitor.process)
        monitor.serves = await self._ask(monitor)
        peer, weights = monitor.peer, self._current
        if self._asleep:
            if not monitor.asleep:
                await self._tell(monitor, "go to sleep", self._server_api.sleep(peer))
                monitor.asleep = True
        elif weights is not None and (monitor.given is not weights or monitor.serves != weights.version):
            if monitor.failures or weights is self._committed:  # else they have been read back just now
                await asyncio.to_thread(weights.verify)
            await self._tell(monitor, f"acknowledge version {weights.version}", self._load(monitor, weights))
            monitor.serves, monitor.asleep = await self._ask(monitor), False
            if monitor.serves != weights.version:
                raise RequestFailed(f"{peer.name} was given version {weights.version} and serves {monitor.serves}")
            monitor.given = weights
        monitor.never_well, monitor.refusals, monitor.well = False, 0, time.monotonic()
        if monitor.process is not None:
            monitor.process.calm()

    async def _tell(self, monitor: ServerMonitor, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            with monitor.peer.parse("what it says when it is told something new"):
                async with deadline(f"rank 0 waits for {monitor.peer.name} to {what}", self._options.sync_s):
                    await work
        except (BadResponse, RequestRefused) as error:
            monitor.refusals += not error.busy
            raise

    async def _load(self, monitor: ServerMonitor, weights: WeightVersion) -> None:
        before, group = monitor.holds(), self._options.transport == "group"
        fresh = before is None and not monitor.asleep
        channel = await monitor.line.channel(fresh) if group else None
        await self._server_api.load(monitor.peer, weights, before, channel)

    async def _ask(self, monitor: ServerMonitor) -> int | None:
        """The version of a server that is up."""
        what = f"rank 0 waits for {monitor.peer.name} to say how it is"
        with monitor.peer.parse("what it says of itself"):
            async with deadline(what, min(LOOK_S, self._options.sync_s)):
                await self._server_api.healthy(monitor.peer)
                return await self._server_api.version(monitor.peer)

    async def _revive(self, monitor: ServerMonitor, process: ServerProcess) -> None:
        """Starts a process anew that has ended, says no, or has not been well for as long as a start may take."""
        ended, now = process.ended(), time.monotonic()
        if ended:
            if monitor.never_well or now < process.again:
                raise RequestFailed(f"{monitor.peer.name} {ended}")
        else:
            unwilling = monitor.refusals > self._options.retries and not monitor.anew
            if now - monitor.well < self._options.start_s and not unwilling:
                return
            ended = f"has not been well for {now - monitor.well:.0f} s: {monitor.problem}"
            monitor.refusals, monitor.anew = 0, unwilling
            process.end()
            await asyncio.to_thread(process.wait)
        logging.getLogger(__name__).warning("%s is started anew: it %s", monitor.peer.name, ended)
        process.start()
        monitor.well = time.monotonic()
