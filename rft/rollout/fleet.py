"""What rank zero does for servers: starts its own, brings all of them to the current weights, and again when they fail.

There is one rule: a server that is up and serves another version than the current one is given the current one. So a
new version, a server that was late, one that was started anew and one that somebody else started anew are one case.
"""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from rft.rollout import warden
from rft.rollout.channel import Line
from rft.rollout.dialect import LOCAL, Dialect
from rft.rollout.peer import LOOK_S, Failed, Garbage, Peer, Refused, waiting
from rft.rollout.server_options import Servers
from rft.rollout.staging import Weights

GRACE_S = 5.0  # that a process has to end by itself
LONGEST_S = 60.0  # between two starts of a process that ends at once


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        return int(probe.getsockname()[1])


class Process:
    """A server process of our own.

    Args:
        command, environment: what is run, and what is added to the environment.
        log: the file that takes what it says.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._command = [sys.executable, warden.__file__, str(GRACE_S), *command]
        self._environment = os.environ | environment
        self._starts = 0
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self.start()

    def start(self) -> None:
        """Starts it, and notes when it may be started again."""
        self.started = time.monotonic()
        self.again = self.started + min(2.0**self._starts, LONGEST_S)
        self._starts += 1
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self) -> str:
        """How it ended, with its last words; empty while it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        return f"ended with status {status}; the end of {self.log}:\n{self.log.read_text(errors='replace')[-2000:]}"

    def calm(self) -> None:
        """It is well: when it ends, it is started anew at once."""
        self._starts = 0

    def end(self) -> None:
        """Has it end, with all that it has started."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> None:
        """Waits until it has ended."""
        self._process.wait(2 * GRACE_S + LOOK_S)


class Keeper:
    """One server, as rank zero looks after it.

    Attributes:
        serves: the version that it serves, None where that is not known.
        given: what it was given last. The same number may be of another run.
        problem: what was wrong at the last look.
        failures: looks that failed since the last new version.
        refuses: it is up, and says that it does not take the weights.
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
        self.failures = 0
        self.refuses = False
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
        self._current = weights
        for keeper in self._keepers:
            keeper.failures = 0
            keeper.wake.set()
        what = f"acknowledge version {weights.version}"
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
        self._committed = weights

    def _settled(self) -> bool:
        for task in self._watching:
            if task.done():
                task.result()  # it ends by an error of the program alone
        behind = self._behind()
        if self._committed is None:
            for keeper in behind:
                if keeper.never_well and keeper.process is not None and (ended := keeper.process.ended()):
                    raise Failed(f"{keeper.peer.name} {ended}")
                if keeper.refuses and keeper.failures > self._options.retries:
                    raise Failed(keeper.problem)
            return not behind
        lost = [keeper for keeper in behind if keeper.failures > self._options.retries]
        return not behind or len(behind) == len(lost) < len(self._keepers)

    def _behind(self) -> list[Keeper]:
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
                keeper.serves, keeper.problem = None, str(error)
                keeper.failures += 1 + isinstance(error, TimeoutError) * self._options.retries
            finally:
                self._news.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_s):
                    await keeper.wake.wait()

    async def _look(self, keeper: Keeper) -> None:
        """Brings a server to the current version, where it is not.

        Raises:
            OSError: it is not well.
        """
        if keeper.process is not None:
            await self._revive(keeper, keeper.process)
        peer, weights = keeper.peer, self._current
        keeper.refuses = False
        keeper.serves = await self._ask(keeper)
        if weights is not None and (keeper.given is not weights or keeper.serves != weights.version):
            if keeper.failures or weights is self._committed:  # else they have been read back just now
                await asyncio.to_thread(weights.verify)
            what = f"rank 0 waits for {peer.name} to acknowledge version {weights.version}"
            try:
                with peer.sense("what it says of new weights"):
                    async with waiting(what, self._options.sync_s):
                        before, group = keeper.holds(), self._options.transport == "group"
                        channel = await keeper.line.channel(fresh=before is None) if group else None
                        await self._dialect.load(peer, weights, before, channel)
            except (Garbage, Refused) as error:
                keeper.refuses = not error.busy
                raise
            keeper.serves = await self._ask(keeper)
            if keeper.serves != weights.version:
                raise Failed(f"{peer.name} was given version {weights.version} and serves {keeper.serves}")
            keeper.given = weights
        keeper.never_well, keeper.well = False, time.monotonic()
        if keeper.process is not None:
            keeper.process.calm()

    async def _ask(self, keeper: Keeper) -> int | None:
        """The version of a server that is up."""
        what = f"rank 0 waits for {keeper.peer.name} to say how it is"
        with keeper.peer.sense("what it says of itself"):
            async with waiting(what, min(LOOK_S, self._options.sync_s)):
                await self._dialect.healthy(keeper.peer)
                return await self._dialect.version(keeper.peer)

    async def _revive(self, keeper: Keeper, process: Process) -> None:
        """Starts a process anew that has ended, or has not been well for as long as a start may take."""
        ended, now = process.ended(), time.monotonic()
        if ended:
            if keeper.never_well or now < process.again:
                raise Failed(f"{keeper.peer.name} {ended}")
        elif now - keeper.well < self._options.start_s:
            return
        else:
            ended = f"has not been well for {now - keeper.well:.0f} s: {keeper.problem}"
            process.end()
            await asyncio.to_thread(process.wait)
        logging.getLogger(__name__).warning("%s is started anew: it %s", keeper.peer.name, ended)
        process.start()
        keeper.well = time.monotonic()
