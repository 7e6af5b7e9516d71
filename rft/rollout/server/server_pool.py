"""What rank 0 does for all servers: it starts those of the run, brings all to the current weights, restarts its own.

One rule covers a new version, a late server and a restarted server: a server that is up and serves another version than
the current one gets the current one. While the servers are to sleep, a server that is up is put to sleep, and the next
version wakes it.
"""

import asyncio
import contextlib
import logging
import shlex
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from rft.remote.http_client import PROBE_S, BadResponse, RequestFailed, RequestRefused, ServerClient, deadline
from rft.remote.server_process import ServerProcess
from rft.rollout.server.options import KEY, Servers
from rft.rollout.server.remote.rft_server_key import KEY_VARIABLE
from rft.rollout.server.server_api import ServerApi
from rft.rollout.server.weights.transport import WeightTransport
from rft.rollout.server.weights.version import WeightVersion
from rft.waits import Reminder


class ServerMonitor:
    """What rank 0 knows of one server.

    Args:
        client: of the server.
        process: the server's, if the run started it.

    Attributes:
        transport: of weights to the server, None where none is open.
        serves: the version that the server serves, None where that is unknown.
        loaded: the weights that it loaded last. Its version may be of another run and have the same number.
        problem: what was wrong at the last check.
        failures: failed checks since the last new version or sleep; of a lost server, since its last successful check.
        refusals: of these, how often the server was up and refused, since its last restart for that.
        restarted: it was restarted because it refused.
        asleep: it sleeps, and every check since then has succeeded.
        never_healthy: no check has succeeded yet.
        last_healthy: the time of the last successful check or start, of `time.monotonic`.
        wake: starts the next check at once.
    """

    def __init__(self, client: ServerClient, process: ServerProcess | None) -> None:
        self.client = client
        self.process = process
        self.transport: WeightTransport | None = None
        self._sent = 0  # by transports that are closed
        self.serves: int | None = None
        self.loaded: WeightVersion | None = None
        self.problem = "not checked yet"
        self.failures = self.refusals = 0
        self.restarted = self.asleep = False
        self.never_healthy = True
        self.last_healthy = time.monotonic()
        self.wake = asyncio.Event()

    def holds(self) -> WeightVersion | None:
        """The weights that the server has in memory, None where that is unknown."""
        return self.loaded if self.loaded is not None and self.loaded.version == self.serves else None

    def sent(self) -> int:
        """Bytes of weights that have been sent to the server's workers."""
        return self._sent + (self.transport.sent if self.transport is not None else 0)

    def close_transport(self) -> None:
        """Closes the transport, if one is open."""
        if self.transport is not None:
            self._sent = self.sent()
            self.transport.close()
            self.transport = None


class ServerPool:
    """All servers of a run.

    Args:
        server_api, clients, options: of the servers.
        processes: of the servers that the run started, one per client; else empty.
        device: of this process.
        model: the folder that servers start from.
    """

    def __init__(
        self,
        server_api: ServerApi,
        clients: list[ServerClient],
        processes: list[ServerProcess],
        options: Servers,
        device: torch.device,
        model: Path,
    ) -> None:
        self._server_api = server_api
        self._model = model
        self._options = options
        self._device = device
        started: list[ServerProcess | None] = [*processes] or [None] * len(clients)
        self._monitors = [ServerMonitor(*parts) for parts in zip(clients, started, strict=True)]
        self._current: WeightVersion | None = None
        self._asleep = False
        self._committed: WeightVersion | None = None
        self._checked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def watch(self) -> None:
        """Starts to monitor all servers."""
        self._tasks = [asyncio.create_task(self._monitor(monitor)) for monitor in self._monitors]

    async def stop(self) -> None:
        """Ends the monitoring and closes all transports."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for monitor in self._monitors:
            monitor.close_transport()

    def sent(self) -> int:
        """Bytes of weights that have been sent to the servers' workers."""
        return sum(monitor.sent() for monitor in self._monitors)

    async def commit(self, weights: WeightVersion) -> None:
        """Makes a version the current one and waits until the servers acknowledge it.

        The first version must reach all servers. Later a server that fails is left behind as long as there is another;
        it gets the current version when it is back.

        Raises:
            OSError: no server, or for the first version not every server, acknowledges the version; names them.
        """
        self._current, self._asleep = weights, False
        await self._reach(f"acknowledge version {weights.version}")
        self._committed = weights

    async def sleep(self) -> None:
        """Lets all servers release their memory until the next version. One that fails keeps it, if another sleeps.

        Raises:
            OSError: no server goes to sleep; names them.
        """
        self._asleep = True
        await self._reach("go to sleep")

    async def _reach(self, what: str) -> None:
        for monitor in self._monitors:
            if monitor.failures <= self._options.retries:  # else it is lost until a check succeeds: no wait for it
                monitor.failures = 0
            monitor.refusals, monitor.restarted = 0, False
            monitor.wake.set()
        try:
            limit = self._options.sync_s + self._options.start_s
            wait = f"rank 0 waits for {{}} to {what} ({{}})"
            async with deadline(lambda: wait.format(self._names(), self._problems()), limit, Reminder()):
                while not self._settled():
                    self._checked.clear()
                    await self._checked.wait()
        except TimeoutError:
            if self._committed is None or len(self._behind()) == len(self._monitors):
                raise
        if self._behind():
            logging.getLogger(__name__).warning(
                "%s did not %s and is left behind until it does (%s)", self._names(), what, self._problems()
            )

    def _settled(self) -> bool:
        for task in self._tasks:
            if task.done():
                task.result()  # only an error of the program ends it
        behind = self._behind()
        if self._committed is None:
            for monitor in behind:
                if monitor.never_healthy and monitor.process is not None and (ended := monitor.process.ended()):
                    raise RequestFailed(f"{monitor.client.name} {ended}")
                if monitor.refusals > self._options.retries:
                    raise RequestFailed(monitor.problem)
            return not behind
        if all(self._refuses(monitor) for monitor in self._monitors):
            raise RequestFailed(self._problems())
        lost = [monitor for monitor in behind if monitor.failures > self._options.retries]
        return not behind or len(behind) == len(lost) < len(self._monitors)

    def _refuses(self, monitor: ServerMonitor) -> bool:
        """True where a server keeps refusing, and one that the run started refuses after a restart too."""
        return monitor.refusals > self._options.retries and (monitor.process is None or monitor.restarted)

    def _behind(self) -> list[ServerMonitor]:
        if self._asleep:
            return [monitor for monitor in self._monitors if not monitor.asleep]
        assert self._current is not None
        wanted = (self._current, self._current.version)
        return [monitor for monitor in self._monitors if (monitor.loaded, monitor.serves) != wanted]

    def _names(self) -> str:
        return ", ".join(monitor.client.name for monitor in self._behind())

    def _problems(self) -> str:
        return "; ".join(monitor.problem for monitor in self._behind())

    async def _monitor(self, monitor: ServerMonitor) -> None:
        while True:
            monitor.wake.clear()
            try:
                await self._check(monitor)
                monitor.failures = 0
            except OSError as error:
                if monitor.serves is not None:
                    logging.getLogger(__name__).warning("%s is down: %s", monitor.client.name, error)
                monitor.close_transport()
                monitor.serves, monitor.asleep, monitor.problem = None, False, str(error)
                monitor.failures += 1 + isinstance(error, TimeoutError) * self._options.retries
                if isinstance(error, RequestRefused) and error.missing and monitor.process is None:
                    monitor.refusals = self._options.retries + 1  # waiting does not cure it
                    monitor.problem += f"\n{self._start_by_hand(monitor.client)}"
                if isinstance(error, RequestRefused) and error.unauthorized:
                    monitor.refusals = self._options.retries + 1
                    monitor.problem += f"; {KEY}.token names the environment variable with the key of the server"
            finally:
                self._checked.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.poll_s):
                    await monitor.wake.wait()

    def _start_by_hand(self, client: ServerClient) -> str:
        command, environment = self._server_api.command("python", self._model, client.port, client.host)
        variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        if (token := self._options.token) is not None:
            variables.append(f'{KEY_VARIABLE}="${token}"')
        return f"It was started without an endpoint that this run needs. Start it with\n{' '.join(variables)} " + (
            shlex.join(command)
        )

    async def _check(self, monitor: ServerMonitor) -> None:
        """Checks a server, and brings it to the current version or to sleep where it is not.

        Raises:
            OSError: the server is down, or does not do so.
        """
        if monitor.process is not None:
            await self._restart_if_needed(monitor, monitor.process)
        monitor.serves = await self._version(monitor)
        client, weights = monitor.client, self._current
        if self._asleep:
            if not monitor.asleep:
                await self._order(monitor, "go to sleep", self._server_api.sleep(client))
                monitor.asleep = True
        elif weights is not None and (monitor.loaded is not weights or monitor.serves != weights.version):
            if monitor.failures or weights is self._committed:  # else they have been read back just now
                await asyncio.to_thread(weights.verify)
            await self._order(monitor, f"acknowledge version {weights.version}", self._load(monitor, weights))
            monitor.serves, monitor.asleep = await self._version(monitor), False
            if monitor.serves != weights.version:
                raise RequestFailed(f"{client.name} was given version {weights.version} and serves {monitor.serves}")
            monitor.loaded = weights
        monitor.never_healthy, monitor.refusals, monitor.last_healthy = False, 0, time.monotonic()
        if monitor.process is not None:
            monitor.process.reset_restarts()

    async def _order(self, monitor: ServerMonitor, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            with monitor.client.parse(f"a response to the order to {what}"):
                async with deadline(f"rank 0 waits for {monitor.client.name} to {what}", self._options.sync_s):
                    await work
        except (BadResponse, RequestRefused) as error:
            monitor.refusals += not error.busy
            raise

    async def _load(self, monitor: ServerMonitor, weights: WeightVersion) -> None:
        client, before = monitor.client, monitor.holds()
        if before is None and not monitor.asleep:  # it was restarted, or its state is unknown
            monitor.close_transport()
        if monitor.transport is None:
            monitor.transport = await self._server_api.transport(client, self._options, self._device)
            await monitor.transport.open()
        await self._server_api.load(client, weights, before, monitor.transport)

    async def _version(self, monitor: ServerMonitor) -> int | None:
        """The version of a server that is up."""
        what = f"rank 0 waits for {monitor.client.name} to report its state"
        with monitor.client.parse("its state"):
            async with deadline(what, min(PROBE_S, self._options.sync_s)):
                await self._server_api.healthy(monitor.client)
                return await self._server_api.version(monitor.client)

    async def _restart_if_needed(self, monitor: ServerMonitor, process: ServerProcess) -> None:
        """Restarts a process that has ended, keeps refusing, or has not been healthy for `start_s` seconds."""
        ended, now = process.ended(), time.monotonic()
        if ended:
            if monitor.never_healthy or now < process.restart_after:
                raise RequestFailed(f"{monitor.client.name} {ended}")
        else:
            refuses = monitor.refusals > self._options.retries and not monitor.restarted
            if now - monitor.last_healthy < self._options.start_s and not refuses:
                return
            ended = f"has not been healthy for {now - monitor.last_healthy:.0f} s: {monitor.problem}"
            monitor.refusals, monitor.restarted = 0, refuses
            process.end()
            await asyncio.to_thread(process.wait)
        logging.getLogger(__name__).warning("%s is restarted: it %s", monitor.client.name, ended)
        process.start()
        monitor.last_healthy = time.monotonic()
