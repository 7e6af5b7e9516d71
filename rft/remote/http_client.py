"""A server by its address: JSON over HTTP/1.1, one connection a call, and waits that have a deadline and a name.

Left out on purpose: kept connections, redirects, compression and TLS; servers of one run stand in one network.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

SAY_EVERY = 30.0  # seconds between the lines of a long wait
LOOK_S = 10.0  # deadline of a call that needs no work
LARGEST = 2**16  # bytes of the head of an answer


class RequestFailed(OSError):
    """A call that did not bring what was asked for; the message names the server.

    Attributes:
        busy: the server says that the same call may succeed later.
    """

    busy = False


class RequestRefused(RequestFailed):
    """An answer that is not a success, with this status of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.busy = status in (429, 503)


class BadResponse(RequestFailed):
    """An answer that does not hold what was asked for."""


class ServerClient:
    """One server.

    Args:
        number: its place in the list of servers.
        address: host:port.
        kind: what messages call it.
    """

    def __init__(self, number: int, address: str, kind: str = "server") -> None:
        self.name = f"{kind} {number} ({address})"
        self.host, _, port = address.rpartition(":")
        self.port = int(port)

    async def get(self, path: str) -> Any:
        """What a GET answers: JSON, or None for an empty body. Raises as `post`."""
        return self._json(f"GET {path}", await self._call("GET", path, b""))

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What a POST of JSON answers: JSON, or None for an empty body. It waits for as long as it is let.

        Raises:
            Refused: the status is not 2xx.
            Garbage: the answer is no HTTP or no JSON.
            Failed: the connection could not be made, or broke.
        """
        return self._json(f"POST {path}", await self.tell(path, body))

    async def tell(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """What a POST of JSON answers that may be no JSON. Raises as `post`."""
        return await self._call("POST", path, json.dumps(body or {}).encode())

    def _json(self, call: str, answer: bytes) -> Any:
        try:
            return json.loads(answer) if answer.strip() else None
        except ValueError as error:
            raise self.bad_response(f"{call}: no JSON: {answer[:80]!r}") from error

    async def _call(self, method: str, path: str, body: bytes) -> bytes:
        try:
            status, answer = await self._exchange(method, path, body)
        except RequestFailed:
            raise
        except (OSError, EOFError) as error:
            raise RequestFailed(f"{self.name}: {method} {path}: {error or type(error).__name__}") from error
        if not 200 <= status < 300:
            said = answer[:500].decode(errors="replace")
            raise RequestRefused(f"{self.name}: {method} {path}: status {status}: {said}", status)
        return answer

    def bad_response(self, what: str) -> BadResponse:
        """The error of an answer that makes no sense."""
        return BadResponse(f"{self.name}: {what}")

    @contextmanager
    def parse(self, what: str) -> Iterator[None]:
        """Where an answer is taken apart: what it lacks is raised as Garbage."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self.bad_response(f"{what} makes no sense: {error!r}") from error

    async def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=LARGEST)
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
            return await self._answer(reader)
        finally:
            writer.close()  # a server ends the work of a client that is gone

    async def _answer(self, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(first.split(" ")[1])
            fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if fields.get("transfer-encoding", "").lower() == "chunked":
                parts = []
                while size := int((await reader.readline()).split(b";")[0], 16):
                    parts.append(await reader.readexactly(size))
                    await reader.readline()
                return status, b"".join(parts)
            if "content-length" in fields:
                return status, await reader.readexactly(int(fields["content-length"]))
            return status, await reader.read()
        except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise self.bad_response(f"an answer that is no HTTP: {error}") from error


@asynccontextmanager
async def deadline(what: str | Callable[[], str], deadline: float | None) -> AsyncIterator[None]:
    """A wait with a name, which is logged while it lasts.

    Args:
        what: who waits for whom to do what.
        deadline: seconds, or None where what is waited for has deadlines of its own.

    Raises:
        TimeoutError: names the wait.
    """
    start = time.monotonic()

    def name() -> str:
        return what if isinstance(what, str) else what()

    async def say() -> None:
        while True:
            await asyncio.sleep(SAY_EVERY)
            logging.getLogger(__name__).warning("%s, %.0f s", name(), time.monotonic() - start)

    saying = asyncio.create_task(say())
    try:
        async with asyncio.timeout(deadline) as limit:
            yield
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"{name()}, {deadline:g} s") from error
        raise
    finally:
        saying.cancel()
