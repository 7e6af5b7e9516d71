"""The key of a server: a request without it gets the status 401, at every path.

vLLM's own key (`--api-key`) leaves the endpoints for developers open, which run code in its workers
(`/collective_rpc`). So its server gets `RequireKey` as a middleware. The key comes in an environment variable, since
every user of the machine can read command lines. It needs the standard library alone; see `rft_receiver`.
"""

import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY_VARIABLE = "RFT_SERVER_KEY"  # without it the server needs no key
Messages = Callable[..., Awaitable[Any]]  # of ASGI: receive, or send


class RequireKey:
    """An ASGI middleware that answers requests without `Authorization: Bearer <key>` itself.

    Args:
        app: the application behind it.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode() if (key := os.environ.get(KEY_VARIABLE)) else None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Messages, send: Messages) -> None:
        """Answers a call without the key, and passes all others on."""
        if scope["type"] == "lifespan" or self._expected is None:
            return await self._app(scope, receive, send)
        given = dict(scope["headers"]).get(b"authorization", b"")
        if secrets.compare_digest(given, self._expected):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})  # policy violation, RFC 6455
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "this server needs another bearer token"}'})
