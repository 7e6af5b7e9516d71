"""The web application of a server of reward terms. It needs the extra `serve`, so only `mode=serve` imports it.

A thread scores the requests, so that the event loop stays free. Requests that wait are scored together: one at a time
would leave worker processes idle and make the batches of a model small.
"""

import asyncio
import base64
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from rft.batch.scores import Scores, spell_reason
from rft.data.strict_json import value_of
from rft.errors import FunctionError, prefixed
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

PREFIX = "rft_reward_"
PROMETHEUS = "text/plain; version=0.0.4"


class Measures:
    """Counts since the start of the server.

    Attributes:
        requests: by path and HTTP status.
        seconds: between the arrival of a request and its answer, by path.
    """

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._scored = 0
        self._unscored: Counter[tuple[str, str]] = Counter()

    def add(self, scores: Scores) -> None:
        """Counts the responses of a request, and the terms that gave no score, by reason."""
        self._scored += int((~scores.total.isnan()).sum())
        for reasons in scores.unscored:
            self._unscored.update((term, spell_reason(reason)) for term, reason in reasons.items())

    def text(self, in_flight: int) -> str:
        """All numbers in the text format of Prometheus, version 0.0.4.

        Args:
            in_flight: requests that wait or are being scored.
        """
        lines = [
            *_head("requests_total", "counter", "requests by path and HTTP status"),
            *(_line("requests_total", n, path=path, status=status) for (path, status), n in self.requests.items()),
            *_head("seconds_total", "counter", "seconds from requests to answers by path"),
            *(_line("seconds_total", round(n, 6), path=path) for path, n in self.seconds.items()),
            *_head("scored_total", "counter", "responses with a score"),
            _line("scored_total", self._scored),
            *_head("unscored_total", "counter", "responses without a score of a term, by term and reason"),
            *(_line("unscored_total", n, term=term, reason=cause) for (term, cause), n in self._unscored.items()),
            *_head("in_flight", "gauge", "requests that wait or are being scored"),
            _line("in_flight", in_flight),
        ]
        return "".join(f"{line}\n" for line in lines)


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {help_text}", f"# TYPE {PREFIX}{name} {kind}"]


def _line(name: str, value: float, **labels: object) -> str:
    inner = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
    return f"{PREFIX}{name}{{{inner}}} {value}" if inner else f"{PREFIX}{name} {value}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Full(Exception):
    """The server has as many requests as its limits allow."""


@dataclass(frozen=True)
class Waiting:
    """A request that waits for its scores.

    Attributes:
        responses, rows: N texts and the rows that they answer.
        scores: receives their scores.
    """

    responses: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    scores: asyncio.Future[Scores]


class Scoring:
    """The reward of a server.

    Args:
        reward: computes the scores.
        limits: of the server.

    Attributes:
        reward: as given.
        in_flight: requests that arrive, wait or are being scored.
    """

    def __init__(self, reward: WeightedSum, limits: ScoringLimits) -> None:
        self.reward = reward
        self.in_flight = 0
        self._limits = limits
        self._waiting: deque[Waiting] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Inside, a request is in flight. It enters before its body is read.

        Raises:
            Full: too many requests are in flight.
        """
        if self.in_flight >= self._limits.requests:
            raise Full
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def score(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Scores:
        """The scores of N responses; see `WeightedSum.score`.

        Raises:
            FunctionError: a term has returned what is no list of scores.
        """
        waiting = Waiting(responses, rows, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._score_all())
        return await waiting.scores

    async def _score_all(self) -> None:
        """Scores until no request waits."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            chosen = self._next()
            responses = [text for request in chosen for text in request.responses]
            rows = [row for request in chosen for row in request.rows]
            scoring = loop.run_in_executor(self._thread, self.reward.score, responses, rows)
            await asyncio.wait([scoring])
            start = 0
            for request in chosen:
                end = start + len(request.responses)
                if request.scores.cancelled():
                    pass
                elif (error := scoring.exception()) is not None:
                    request.scores.set_exception(error)
                else:
                    request.scores.set_result(part(scoring.result(), slice(start, end)))
                start = end

    def _next(self) -> list[Waiting]:
        """The oldest requests that fit into one scoring, at least one."""
        chosen = [self._waiting.popleft()]
        room = self._limits.rows - len(chosen[0].responses)
        while self._waiting and len(self._waiting[0].responses) <= room:
            chosen.append(self._waiting.popleft())
            room -= len(chosen[-1].responses)
        return chosen


def part(scores: Scores, rows: slice) -> Scores:
    """The scores of some of the responses."""
    return Scores(
        total=scores.total[rows],
        terms={name: values[rows] for name, values in scores.terms.items()},
        unscored=scores.unscored[rows],
        whole_group=scores.whole_group[rows],
        numbers={name: values[rows] for name, values in scores.numbers.items()},
    )


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
            with prefixed(f"row {number}: "):
                reward.check_fields(row)
    except ValueError as error:
        raise HTTPException(422, str(error)) from error
    return batch
