"""A web server with limits. It needs the extra `serve`, so only modules of servers import it."""

import asyncio
import logging
from functools import partial
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rft.remote.http_limits import HttpLimits

MIB = 2**20
LEFT = 499  # the status that nginx has for a client that has left; no client receives it
ARRIVING = (h11.IDLE, h11.SEND_BODY)  # states of a client whose request is not complete
UNANSWERED = (h11.IDLE, h11.SEND_RESPONSE)  # states of a server that has not begun its answer


class LimitedProtocol(H11Protocol):
    """A connection, which is closed if a request does not arrive in time. uvicorn itself waits forever.

    Args:
        limits: of the server.
    """

    def __init__(self, limits: HttpLimits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse("503 Service Unavailable")
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.trailing_data[0]:  # of the next request, which came before this answer
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Starts the time of a request with its first byte, that of the first one with the connection."""
        if self.conn.their_state not in ARRIVING:
            self._rest()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self._limits.request_s, self._refuse, "408 Request Timeout")

    def _rest(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: str) -> None:
        """Answers what has not arrived, and closes the connection."""
        if not self.transport.is_closing():
            if self.conn.our_state in UNANSWERED:
                self.transport.write(f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
            self.transport.close()


def make_server(app: FastAPI, limits: HttpLimits, **options: Any) -> uvicorn.Server:
    """A server of an application. A client that leaves before its request is complete is one line of the log.

    Args:
        app: reads bodies with `read_body`.
        limits: of the server.
        options: of `uvicorn.Config`.
    """
    app.exception_handler(ClientDisconnect)(_client_left)
    protocol: Any = partial(LimitedProtocol, limits)
    return uvicorn.Server(
        uvicorn.Config(_draining(app), http=protocol, ws="none", log_config=None, access_log=False, **options)
    )


async def read_body(request: Request, limits: HttpLimits, key: str) -> bytes:
    """The body of a request.

    Args:
        key: where the limit stands, for the message.

    Raises:
        HTTPException: 413, the body is too large; before it is read if its header says so.
        ClientDisconnect: the client has left.
    """
    most, data = limits.body_mib * MIB, bytearray()
    refused = HTTPException(413, f"a request may have {limits.body_mib:g} MiB ({key})")
    if int(request.headers.get("Content-Length", "0")) > most:
        raise refused
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise refused
    return bytes(data)


def _draining(app: FastAPI) -> ASGIApp:
    """The application, which ends an answer once the request has arrived and drops what it did not read of it.

    The client has the answer before. If the connection were closed while the client sends, it might not read it.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        arrived = False

        async def part() -> Message:
            nonlocal arrived
            message = await receive()
            arrived = not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if last and not arrived:
                await send({**message, "more_body": True})
                while not arrived:
                    await part()
                message = {"type": "http.response.body"}
            await send(message)

        await app(scope, part, answer)

    return run


async def _client_left(request: Request, error: Exception) -> Response:
    logging.getLogger(__name__).warning("%s: a client has left before its request was complete", request.url.path)
    return Response(status_code=LEFT)
