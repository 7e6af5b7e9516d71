"""Environments of servers of OpenEnv, by their WebSocket protocol. The package `websockets` is an extra.

The protocol is that of openenv 0.10, `openenv/core/env_client.py`: JSON messages `{type, data}` at `/ws`; a request
`reset` or `step` is answered by an `observation`, or by an `error`.
"""

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rft.imports import require_package
from rft.ranges import Seconds
from rft.rollout.environment.hosted import as_text

Step = tuple[str, float, bool, bool, dict[str, Any]]


@dataclass(kw_only=True, eq=False)
class OpenEnv:
    """An environment of a server that runs already. Each episode has a connection, and so a session, of its own.

    Attributes:
        url: of the server, such as http://localhost:8000.
        action: the field of an action that gets the policy's text.
        action_fields: other fields of each action.
        observation: the field of an observation that the policy reads, as JSON if it is no text.
        reset_fields: fields of the row that `reset` of the server gets, such as seed.
        headers: of the HTTP request that opens a connection.
        request_s: seconds of one request.

    Raises:
        ValueError: the package is missing, the url is none of HTTP, or no server listens there.
    """

    url: str
    action: str
    action_fields: dict[str, Any]
    observation: str
    reset_fields: list[str]
    headers: dict[str, str]
    request_s: Seconds

    def __post_init__(self) -> None:
        require_package("websockets", "the package websockets is not installed; pip install 'rft[openenv]'")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"url={self.url!r}: expected that of a server, such as http://localhost:8000")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname, port), timeout=self.request_s).close()
        except OSError as error:
            raise ValueError(f"url={self.url}: the server does not answer ({error}); start it") from error
        self._connection: Any = None

    def reset(self, **row: Any) -> str:
        """Opens a session; returns the first observation, which is put behind the prompt. Raises as `step`."""
        from websockets.sync.client import connect

        if missing := [name for name in self.reset_fields if name not in row]:
            raise ValueError(f"reset_fields: the row has no field {missing[0]!r} (it has: {', '.join(row)})")
        self._connection = connect(
            f"ws{self.url.removeprefix('http').rstrip('/')}/ws",
            additional_headers=self.headers,
            open_timeout=self.request_s,
            max_size=None,
        )
        return self._text(self._request("reset", {name: row[name] for name in self.reset_fields}))

    def step(self, action: str) -> Step:
        """One turn; see the contract.

        Raises:
            RuntimeError: the server answers with an error, such as an action without a field that it requires.
            ValueError: the observation has no field of that name.
            TimeoutError: there is no answer within `request_s`.
            websockets.exceptions.ConnectionClosed: the server has ended.
        """
        turn = self._request("step", {**self.action_fields, self.action: action})
        return self._text(turn), float(turn["reward"] or 0.0), bool(turn["done"]), False, {}

    def close(self) -> None:
        """Ends the session."""
        if self._connection is not None:
            self._connection.close()

    def _request(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        with suppress(ConnectionClosed):  # a server without a free session writes an error and closes; it is read next
            self._connection.send(json.dumps({"type": kind, "data": data}))
        answer: dict[str, Any] = json.loads(self._connection.recv(self.request_s))
        if answer["type"] == "error":
            cure = "; set max_concurrent_envs of the server to the number of open episodes"
            code = answer["data"]["code"]
            raise RuntimeError(
                f"the server answers {kind} with {code}: {answer['data']['message']}"
                f"{cure if code == 'CAPACITY_REACHED' else ''}"
            )
        result: dict[str, Any] = answer["data"]
        return result

    def _text(self, turn: dict[str, Any]) -> str:
        fields = turn["observation"]
        if self.observation not in fields:
            raise ValueError(f"observation={self.observation}: the server's has the fields {', '.join(fields)}")
        return as_text(fields[self.observation])
