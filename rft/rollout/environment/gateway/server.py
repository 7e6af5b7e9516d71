"""Serves the policy as OpenAI's API on this machine. It needs the extra `serve`, so only runs with agents import it."""

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from rft.batch.trajectory import Trajectory
from rft.data.strict_json import value_of
from rft.remote.http_limits import HttpLimits
from rft.remote.http_server import make_server, read_body
from rft.rollout.environment.gateway.api import ORIGIN, ApiError, read_request
from rft.rollout.environment.gateway.session import Session
from rft.rollout.environment.live import LiveEnvironment
from rft.rollout.environment.play.player import Policy

HOST = "127.0.0.1"
KEEP_S = 3600  # seconds without a request after which a connection is closed; tools of an agent may take long
BACKLOG = 2048  # connections that wait; all agents of a step may begin at the same time
END_S = 1  # seconds for the connections to close
LIMITS = HttpLimits(body_mib=32.0, request_s=60.0, connections=4096)


class Gateway:
    """The server of the sessions of one round of episodes, in the event loop that opens it.

        async with Gateway(policy) as gateway:
            with gateway.session(seed) as session:
                ...  # talk to session.base_url with session.api_key
            session.trajectory(live, row, reward=1.0, failed=None)

    It listens on this machine alone. The key of a request names its session. A key is random, and invalid once its
    session has ended.

    Args:
        policy: answers the requests.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._sessions: dict[str, Session] = {}

    async def __aenter__(self) -> Self:
        """Begins to listen."""
        self._listening = socket.create_server((HOST, 0), backlog=BACKLOG)
        self._server = make_server(
            _app(self._sessions, self._policy), LIMITS, log_level="warning", lifespan="off", timeout_keep_alive=KEEP_S,
            timeout_graceful_shutdown=END_S,
        )  # fmt: skip
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        return self

    async def __aexit__(self, *raised: Any) -> None:
        """Ends the server."""
        self._server.should_exit = True
        await self._task

    @contextmanager
    def session(self, seed: int) -> Iterator[Session]:
        """A session for one episode. Afterwards its requests are refused, and those in progress end.

        Args:
            seed: of its first answer.
        """
        key = secrets.token_urlsafe(32)
        base_url = f"http://{HOST}:{self._listening.getsockname()[1]}/v1"
        session = self._sessions[key] = Session(self._policy, base_url, key, seed)
        try:
            yield session
        finally:
            del self._sessions[key]
            session.end()

    async def play(self, live: LiveEnvironment, row: dict[str, Any], seed: int) -> Trajectory:
        """Plays the episode of an agent to its end; also one that fails has a trajectory.

        Args:
            live: the agent.
            row: of the data set, which the agent gets.
            seed: of the first answer.
        """
        with self.session(seed) as session:
            run = live.run(row, session.base_url, session.api_key)
            reward, failed = await live.outcome(run, self._policy.environments.options.max_seconds)
        return session.trajectory(live, row, reward=reward, failed=failed)


def _app(sessions: dict[str, Session], policy: Policy) -> FastAPI:
    """The web application.

    Args:
        sessions: by their keys; it may change.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    def session_of(request: Request) -> Session:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in sessions:
            raise _no_session()
        return sessions[key]

    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(ApiError(error.status_code, f"{request.url.path}: {error.detail}").body, error.status_code)

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        session_of(request)
        return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "rft"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        session = session_of(request)
        async with session.admitted():
            try:
                body = value_of((await read_body(request, LIMITS, "the gateway of agents")).decode(), origin=ORIGIN)
            except ValueError as error:
                raise ApiError(400, f"the body is not JSON: {error}") from error
            asked = read_request(body, policy.sampling)
            try:
                answer = await session.answer(asked)
            except asyncio.CancelledError as error:
                raise _no_session() from error
        if asked.stream:
            return Response(answer.events(asked, policy.encoder.decode), media_type="text/event-stream")
        return JSONResponse(answer.body(asked, policy.encoder.decode))

    return app


def _no_session() -> ApiError:
    """In the words of OpenAI."""
    said = "Incorrect API key provided: no episode has it, or its episode has ended."
    return ApiError(401, said, "invalid_api_key")
