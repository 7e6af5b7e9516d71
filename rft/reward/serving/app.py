"""The web application of a server of reward terms. It needs the extra `serve`, so only `mode=serve` imports it."""

import base64
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from rft.data.strict_json import value_of
from rft.errors import FunctionError
from rft.remote.http_limits import ScoringLimits
from rft.remote.http_server import read_body
from rft.reward.compose import WeightedSum
from rft.reward.serving.endpoints import (
    Batch,
    Endpoint,
    GetRewardEndpoint,
    ScoreEndpoint,
    Unanswerable,
    VerifyEndpoint,
)
from rft.reward.serving.measures import Measures
from rft.reward.serving.scoring import Full, Scoring

PROMETHEUS = "text/plain; version=0.0.4"


def make_app(reward: WeightedSum, fingerprints: Mapping[str | None, str], limits: ScoringLimits, token: str) -> FastAPI:
    """The application that scores responses.

    Args:
        reward: computes the scores.
        fingerprints: of the options of its terms by name, and of all together, None.
        limits: of requests.
        token: that requests must carry, see `has_token`.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    scoring, measures = Scoring(reward, limits), Measures()

    @app.middleware("http")
    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        """Refuses requests without the token, and measures all."""
        started = time.perf_counter()
        if not has_token(request.headers.get("Authorization", ""), token):
            response: Response = JSONResponse({"detail": "this server needs another bearer token"}, 401)
        else:
            response = await answer(request)
        path = request.url.path if response.status_code not in (401, 404) else "other"
        measures.requests[path, response.status_code] += 1
        measures.seconds[path] += time.perf_counter() - started
        return response

    @app.get("/health")
    async def health() -> dict[str, Any]:
        terms = {name: mark for name, mark in fingerprints.items() if name is not None}
        whole = {"sum": fingerprints[None], "accuracy": reward.accuracy, "rows": limits.rows}
        return {"ready": True, "terms": terms, **whole}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(measures.text(scoring.in_flight), media_type=PROMETHEUS)

    for endpoint in (ScoreEndpoint(fingerprints), GetRewardEndpoint(), VerifyEndpoint()):
        app.post(endpoint.path)(_handler(endpoint, scoring, measures, limits))
    return app


def has_token(header: str, token: str) -> bool:
    """Whether an `Authorization` header carries a token: `Bearer <token>`, or as the password of any user.

    Clients that set no header, such as those of OpenRLHF and NeMo-Gym, send the password of http://run:<token>@host.
    """
    scheme, _, given = header.partition(" ")
    if scheme == "Basic":
        try:
            given = base64.b64decode(given, validate=True).decode().partition(":")[2]
        except ValueError:
            return False
    elif scheme != "Bearer":
        return False
    return secrets.compare_digest(given.encode(), token.encode())


def _handler(
    endpoint: Endpoint, scoring: Scoring, measures: Measures, limits: ScoringLimits
) -> Callable[[Request], Awaitable[JSONResponse]]:
    """The function that answers the requests of a path."""

    async def handle(request: Request) -> JSONResponse:
        try:
            with scoring.admitted():
                batch = _read(endpoint, await _body(request, limits), scoring.reward, limits)
                scores = await scoring.score(batch.responses, batch.rows)
            measures.add(scores)
            return JSONResponse(endpoint.answer(batch, scores, scoring.reward))
        except Full as error:
            full = f"{limits.requests} requests are in flight (serve.limits.requests); send this one again later"
            raise HTTPException(503, full, {"Retry-After": "1"}) from error
        except (FunctionError, Unanswerable) as error:
            raise HTTPException(500, str(error)) from error

    return handle


async def _body(request: Request, limits: ScoringLimits) -> Any:
    """The JSON of a request."""
    data = await read_body(request, limits, "serve.limits.body_mib")
    try:
        return value_of(data.decode(), origin="a request")
    except ValueError as error:
        raise HTTPException(422, f"the body is not JSON: {error}") from error


def _read(endpoint: Endpoint, body: Any, reward: WeightedSum, limits: ScoringLimits) -> Batch:
    """What a request asks for."""
    if not isinstance(body, dict):
        raise HTTPException(422, f"the body is an object, not {type(body).__name__}")
    try:
        batch = endpoint.read(body)
        if len(batch.responses) > limits.rows:
            too_many = f"{len(batch.responses)} responses; a request may have {limits.rows} (serve.limits.rows)"
            raise HTTPException(413, too_many)
        for number, row in enumerate(batch.rows):
            try:
                reward.check_fields(row)
            except ValueError as error:
                raise ValueError(f"row {number}: {error}") from error
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    return batch
