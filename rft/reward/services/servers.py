"""The servers of a reward term: their addresses and token, a check of them before the run, and calls."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from rft.remote.call_pool import BreakerOptions, CallPool, CircuitOpen
from rft.remote.http_client import (
    PROBE_S,
    BadResponse,
    RequestFailed,
    RequestRefused,
    ServerClient,
    bearer,
    key_named,
)
from rft.reward.term import Failure

T = TypeVar("T")
REASONS = ((CircuitOpen, "circuit_open"), (BadResponse, "bad_response"), (RequestRefused, "refused"))


class Servers:
    """Servers that compute the same values.

    Args:
        key: of the node in the yaml that has the addresses.
        addresses: http://host:port of each, with a path where their paths have a common beginning.
        token: the name of the environment variable with the bearer token, or None.
        breaker: when a server gets no requests.

    Raises:
        ValueError: there is no address, or one is malformed; names the key.
    """

    def __init__(self, key: str, addresses: Sequence[str], token: str | None, breaker: BreakerOptions) -> None:
        if not addresses:
            raise ValueError(f"{key}.addresses is empty: give the address of a server, such as http://host:8000")
        for number, address in enumerate(addresses):
            ServerClient(f"{key}.addresses[{number}]", address)
        self._key = key
        self._addresses = addresses
        self._token = token
        self._breaker = breaker
        self._pool: CallPool | None = None  # made with the first call, since it needs the token

    async def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], T]) -> T | Failure:
        """What `read` makes of the answer to a POST, or the `Failure` of the last server; see `CallPool.post`.

        Its reason is `unreachable`, `refused`, `bad_response` or `circuit_open`.
        """
        if self._pool is None:
            self._pool = CallPool(self._clients(), self._breaker)
        try:
            return await self._pool.post(path, body, read)
        except RequestFailed as error:
            reason = next((name for kind, name in REASONS if isinstance(error, kind)), "unreachable")
            return Failure(reason, str(error), error, repeatable=error.transient)

    def ask_all(self, ask: Callable[[ServerClient], Awaitable[T]]) -> list[T]:
        """Asks every server once, before the run.

        Args:
            ask: sends the request and reads the answer.

        Returns:
            What the servers that answer return, in order.

        Raises:
            ValueError: the token is missing, no server answers, or one refuses the token; names the key and the cure.
        """
        replies = asyncio.run(self._ask_all(ask))
        for error in replies:
            if isinstance(error, RequestRefused) and error.unauthorized:
                token = self._token or "null"
                raise ValueError(f"{self._key}.token={token}: {error}; name the variable with the server's token")
        answers = [answer for answer in replies if not isinstance(answer, OSError)]
        if not answers:
            raise ValueError(f"{replies[0]}; no server of {self._key}.addresses answers: start one, or correct them")
        return answers

    async def _ask_all(self, ask: Callable[[ServerClient], Awaitable[T]]) -> list[T | OSError]:
        async def one(client: ServerClient) -> T | OSError:
            try:
                async with asyncio.timeout(PROBE_S):
                    return await ask(client)
            except TimeoutError:
                return TimeoutError(f"{client.name}: no answer within {PROBE_S:g} s")
            except OSError as error:
                return error

        return await asyncio.gather(*map(one, self._clients()))

    def _clients(self) -> list[ServerClient]:
        headers = bearer(key_named(self._token, self._key))
        return [
            ServerClient(f"{self._key}.addresses[{number}]={address}", address, headers, use_proxies=True)
            for number, address in enumerate(self._addresses)
        ]
