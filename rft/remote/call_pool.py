"""Sends requests to the least loaded of several servers. A request that fails goes to another server, and a circuit
breaker keeps requests from a server that fails again and again.

`LoadBalancer` distributes a round of groups that must all succeed; here every request stands alone and may fail.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rft.remote.http_client import RequestFailed, ServerClient
from rft.remote.retry import Backoff, BreakerOptions

T = TypeVar("T")
REST_S = (1.0, 30.0)  # the shortest and the longest time in which other servers are preferred to one that has failed
LONGEST = 32  # times the first pause is the longest pause of an open circuit


class CircuitOpen(RequestFailed):
    """No server gets requests now, because all have failed too often."""


class CircuitBreaker:
    """Whether one server gets requests. Closed: all; open: none until the pause ends; then one, which decides.

    Args:
        options: see `BreakerOptions`.
        clock: the time in seconds.
    """

    def __init__(self, options: BreakerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = options.failures
        self._pauses = Backoff(options.pause_s, LONGEST * options.pause_s, clock)
        self._failures = 0
        self._open = self._probing = False

    def admits(self) -> bool:
        """Whether the server gets a request now."""
        return not self._open or not (self._probing or self._pauses.pausing)

    def begin(self) -> bool:
        """A request that the breaker admits is sent; True if it is the probe of an open circuit."""
        self._probing = self._open
        return self._open

    def end(self, answered: bool, probe: bool) -> None:
        """A request has ended. With an open circuit only the probe counts as a failure: the others are older."""
        if probe:
            self._probing = False
        if answered:
            self._failures, self._open = 0, False
            self._pauses.reset()
        elif probe or not self._open:
            self._failures += 1
            self._open = probe or self._failures >= self._most
            if self._open:
                self._pauses.start()


class PooledServer:
    """A server of a pool.

    Args:
        client: sends requests to it.
        options: of its circuit breaker.

    Attributes:
        client: as given.
        breaker: decides whether it gets requests.
        rests: after failures, in which other servers are preferred.
        running: requests that it works on.
        problem: of its last failure; empty without one.
    """

    def __init__(self, client: ServerClient, options: BreakerOptions) -> None:
        self.client = client
        self.breaker = CircuitBreaker(options)
        self.rests = Backoff(*REST_S)
        self.running = 0
        self.problem = ""

    def end(self, problem: str) -> None:
        """A request has ended, with a problem unless the text is empty; failures during a rest count once."""
        if problem and not self.problem:
            logging.getLogger(__name__).warning("%s; its requests go to other servers first", problem)
        self.problem = problem
        if not problem:
            self.rests.reset()
        elif not self.rests.pausing:
            self.rests.start()


class CallPool:
    """Servers that can answer the same requests. Its calls belong to one event loop.

    Args:
        clients: of the servers, at least one.
        options: of the circuit breaker of each server.
    """

    def __init__(self, clients: Sequence[ServerClient], options: BreakerOptions) -> None:
        self._servers = [PooledServer(client, options) for client in clients]

    async def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """Sends a POST to one server after the other until one gives a usable answer. The caller sets the deadline.

        Args:
            path: on every server.
            body: sent as JSON.
            read: the result in a parsed JSON answer; raises a KeyError, IndexError, TypeError or ValueError if the
                answer cannot be used.

        Raises:
            RequestFailed: of the last server, or of the first that refused the request for good.
            CircuitOpen: no server gets requests now.
        """
        tried: list[PooledServer] = []
        failed: RequestFailed | None = None
        while (server := self._choose(tried)) is not None:
            tried.append(server)
            try:
                return await self._post(server, path, body, read)
            except RequestFailed as error:
                if not error.transient:
                    raise
                failed = error
        if failed is not None:
            raise failed
        problems = "; ".join(server.problem for server in self._servers)
        raise CircuitOpen(f"no server gets requests now, after failures in a row: {problems}")

    def _choose(self, tried: Sequence[PooledServer]) -> PooledServer | None:
        choices = [server for server in self._servers if server not in tried and server.breaker.admits()]
        return min(choices, key=lambda server: (server.rests.pausing, server.running), default=None)

    async def _post(self, server: PooledServer, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        alive, problem = False, f"{server.client.name}: no answer before the deadline"
        server.running += 1
        probe = server.breaker.begin()
        try:
            answer = await server.client.post(path, body)
            with server.client.parse(f"the answer of {path}"):
                found = read(answer)
            alive, problem = True, ""
            return found
        except RequestFailed as error:
            alive, problem = error.busy or not error.transient, str(error)  # it answers, if only with a refusal
            raise
        finally:  # also where the deadline has cancelled the call
            server.running -= 1
            server.breaker.end(alive, probe)
            server.end(problem)
