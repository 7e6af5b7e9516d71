"""Scores the requests of a server in a thread, so that the event loop stays free. Requests that wait are scored
together: one at a time would leave worker processes idle and make the batches of a model small.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rft.batch.scores import Scores
from rft.remote.http_limits import ScoringLimits
from rft.reward.compose import WeightedSum


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
            responses = [text for one in chosen for text in one.responses]
            rows = [row for one in chosen for row in one.rows]
            scoring = loop.run_in_executor(self._thread, self.reward.score, responses, rows)
            await asyncio.wait([scoring])
            start = 0
            for one in chosen:
                end = start + len(one.responses)
                if one.scores.cancelled():
                    pass
                elif (error := scoring.exception()) is not None:
                    one.scores.set_exception(error)
                else:
                    one.scores.set_result(part(scoring.result(), slice(start, end)))
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
