"""The HTTP client for engines, teachers and judges: JSON requests, errors that name the server, named deadlines.

Every call opens its own connection and closes it. Calls are long (seconds to minutes), so a kept connection saves
nothing, and a server that runs under uvicorn aborts the work of a client whose connection closes.
"""

import asyncio
import functools
import json
import logging
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

try:  # huggingface_hub depends on httpx2 from version 2 on and on httpx before; the names used here are in both
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef]

from rft.redaction import hide, redact
from rft.sanitize import one_line, valid_text
from rft.waits import Reminder

PROBE_S = 10.0  # deadline of a call that needs no computation
PORTS = {"http": 80, "https": 443}
SHOWN = 500  # characters of a refusal, or of an error about a response, that the error message quotes
HALF_PAIR = re.compile(rb"\\u[dD][89a-fA-F]|\xed")  # such JSON may have half of a surrogate pair
CLOSED = re.compile("disconnected|closed connection")  # in the error of a response that ends early
logging.getLogger(httpx.__name__).setLevel(logging.WARNING)  # it logs every request at level info


class RequestFailed(OSError):
    """A call that returned no usable response; the message names the server.

    Attributes:
        busy: the server rejects requests for now; the same call may succeed later.
        transient: the same call may succeed when it is repeated.
    """

    busy = False
    transient = True


class RequestRefused(RequestFailed):
    """A response with an HTTP status other than 2xx.

    Attributes:
        status: of the response.
        missing: the server has no such endpoint.
        unauthorized: the server needs another bearer token.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
        self.missing = status == 404
        self.unauthorized = status in (401, 403)
        self.busy = status in (429, 503)
        self.transient = status in (408, 409, 429) or status >= 500


class BadResponse(RequestFailed):
    """A response that is not valid HTTP or JSON, or lacks required fields."""


class ServerClient:
    """The client of one server.

    Args:
        name: names the server in messages.
        url: http://host:port or https://host:port, optionally followed by a path.
        headers: sent with every request.
        use_proxies: connect through the proxies in the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY).

    Attributes:
        name: as given.
        host, port: of the server.
        key: the bearer token of requests, where `at` was given one.

    Raises:
        ValueError: `url` is malformed.
    """

    def __init__(
        self, name: str, url: str, headers: Mapping[str, str] | None = None, use_proxies: bool = False
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{name}: {url} is not a URL: {error}") from error
        self.name = name
        self.key: str | None = None
        if parsed.scheme not in PORTS:
            raise ValueError(f"{name}: {url} is not a URL: it starts with neither http:// nor https://")
        self.host, self.port = parsed.host, parsed.port or PORTS[parsed.scheme]
        self._url = url.rstrip("/")
        self._headers = {"Connection": "close", "Content-Type": "application/json", **(headers or {})}
        self._use_proxies = use_proxies

    @classmethod
    def at(cls, number: int, address: str, kind: str = "server", key: str | None = None) -> "ServerClient":
        """The client of a server in a list.

        Args:
            number: position in the list of servers.
            address: host:port.
            kind: what messages call the server.
            key: the bearer token of requests; None: they have none.
        """
        client = cls(f"{kind} {number} ({address})", f"http://{address}", bearer(key))
        client.key = key
        return client

    async def get(self, path: str) -> Any:
        """Sends a GET and returns the parsed JSON, or None for an empty body. Raises as `post`."""
        return self._json(f"GET {path}", await self._call("GET", path, b""))

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Sends JSON in a POST and returns the parsed JSON, or None for an empty body. The caller sets the deadline.

        Raises:
            RequestRefused: the status is not 2xx.
            BadResponse: the response is not HTTP or not JSON.
            RequestFailed: the connection could not be made, or closed before the end of the response.
        """
        return self._json(f"POST {path}", await self.post_raw(path, body))

    async def post_raw(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Sends JSON in a POST and returns the body of the response, which may be anything. Raises as `post`."""
        return await self._call("POST", path, json.dumps(body or {}).encode())

    def _json(self, call: str, answer: bytes) -> Any:
        try:
            found = json.loads(answer) if answer.strip() else None
            return valid_text(found, self.name) if HALF_PAIR.search(answer) else found
        except ValueError as error:
            raise self.bad_response(f"{call}: not JSON: {_start(answer, 80)!r}") from error

    async def _call(self, method: str, path: str, body: bytes) -> bytes:
        call = f"{method} {path}"
        # A request made here, not by the client, carries none of the client's default headers.
        request = httpx.Request(method, self._url + path, headers=self._headers, content=body)
        try:
            async with httpx.AsyncClient(verify=_tls(), trust_env=self._use_proxies, timeout=None) as client:
                response = await client.send(request)
        except httpx.RemoteProtocolError as error:
            if CLOSED.search(str(error)):
                raise RequestFailed(f"{self.name}: {call}: {error}") from error
            raise self.bad_response(f"{call}: not HTTP: {error}") from error
        except (httpx.HTTPError, OSError) as error:
            raise RequestFailed(f"{self.name}: {call}: {_root_cause(error)}") from error
        if not response.is_success:
            said = one_line(_start(response.content, SHOWN))
            raise RequestRefused(f"{self.name}: {call}: status {response.status_code}: {said}", response.status_code)
        return bytes(response.content)

    def bad_response(self, problem: str) -> BadResponse:
        """The error for a response that cannot be used; the caller raises it."""
        return BadResponse(f"{self.name}: {problem}")

    @contextmanager
    def parse(self, what: str) -> Iterator[None]:
        """Surrounds code that reads a response: a missing or malformed field is raised as `BadResponse`."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.bad_response(f"{what} cannot be read: {error!r:.{SHOWN}}") from error


def _start(answer: bytes, count: int) -> str:
    """The first characters of an answer. It is redacted before it is cut, as the cut may lie within a value."""
    return redact(answer.decode(errors="replace"))[:count]


def bearer(key: str | None) -> dict[str, str]:
    """The header of requests with a bearer token; None: no header."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def key_named(token: str | None, where: str) -> str | None:
    """The bearer token in the environment variable that the option `<where>.token` names; null gives None.

    Raises:
        ValueError: there is no such variable; names the option.
    """
    if token is not None and token not in os.environ:
        raise ValueError(f"{where}.token={token}: there is no such environment variable; set it")
    if token is None:
        return None
    hide(os.environ[token], f"${{oc.env:{token}}}")
    return os.environ[token]


@functools.cache
def _tls() -> ssl.SSLContext:
    """Trusts the certificates that Python trusts, which SSL_CERT_FILE names."""
    return ssl.create_default_context()


def _root_cause(error: BaseException) -> str:
    """The operating system's message, such as "Connect call failed", which the client's own errors leave out."""
    found: BaseException | None = error
    while found is not None and not (isinstance(found, OSError) and found.errno is not None):
        causes = found.exceptions if isinstance(found, BaseExceptionGroup) else (found.__cause__ or found.__context__,)
        found = causes[0]
    return str(found or error) or type(error).__name__


@asynccontextmanager
async def deadline(
    what: str | Callable[[], str], deadline: float | None, reminder: Reminder | None = None
) -> AsyncIterator[asyncio.Timeout]:
    """Limits the time of the code inside; the block gets the limit, which can be moved.

    Args:
        what: who waits for what.
        deadline: seconds, or None where the code inside has deadlines of its own.
        reminder: says that the process still waits. None: a wait around this one says so for all servers, or nothing
            waits for the code inside.

    Raises:
        TimeoutError: names the wait.
    """
    start = time.monotonic()

    def name() -> str:
        return what if isinstance(what, str) else what()

    async def remind(reminder: Reminder) -> None:
        while True:
            await asyncio.sleep(start + reminder.after_s - time.monotonic())
            reminder.say(name(), time.monotonic() - start)

    reminding = None if reminder is None else asyncio.create_task(remind(reminder))
    try:
        async with asyncio.timeout(deadline) as limit:
            yield limit
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"{name()}, {deadline:g} s") from error
        raise
    finally:
        if reminding is not None:
            reminding.cancel()
