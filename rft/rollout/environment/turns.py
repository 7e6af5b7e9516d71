"""Lets many dialogues sample from one engine: their requests wait in a queue, and the main thread samples them."""

import asyncio
import queue
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rft.remote.event_loop import EventLoop
from rft.rollout.engine.base import Completion, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler
from rft.waits import waiting

T = TypeVar("T")
FIRST_S = 0.05  # seconds without a new request after which those that wait are sampled: of the first turns,
COLLECT_S = 0.003  # of later ones at least,
COLLECT_SHARE = 0.1  # and so many of the seconds that the engine took before, if that is longer


@dataclass(frozen=True)
class Turn:
    """A request for one completion, and where it is delivered.

    Attributes:
        request: with one seed.
        sampling: how it is sampled.
        delivered: what the dialogue waits for, unless it took too long.
    """

    request: Request
    sampling: Sampling
    delivered: Future[Completion]


class TurnQueue:
    """The requests of the dialogues of one rank.

    A dialogue awaits `sample` in the event loop; `serve` samples in the thread that calls it. Completions are delivered
    one by one as they finish, so that tools begin while others are still sampled. Requests of all open dialogues that
    come soon are sampled together; a dialogue whose tool takes long delays no other. The engine finishes the requests
    that wait together before it begins the next ones.

    Args:
        loop: in which the dialogues run.
        sampler: samples the requests.
    """

    def __init__(self, loop: EventLoop, sampler: Sampler) -> None:
        self._loop = loop
        self._sampler = sampler
        self._waiting: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()
        self._open = 0
        self._collect_s = FIRST_S

    @contextmanager
    def dialogue(self) -> Iterator[None]:
        """Inside, a dialogue is open."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def sample(self, prompt: list[int], seed: int, limit: int, sampling: Sampling) -> Completion:
        """Samples one completion. It depends on the arguments and the weights alone, not on other dialogues.

        Args:
            prompt: token ids.
            limit: most new tokens.
        """
        delivered: Future[Completion] = Future()
        delivered.set_running_or_notify_cancel()  # a dialogue that is cancelled does not cancel what it waited for
        self._waiting.put(Turn(Request(prompt, [seed], [limit]), sampling, delivered))
        return await asyncio.wrap_future(delivered)

    def serve(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs dialogues to their end and returns what they return. An error of the engine ends them."""
        future = self._loop.submit(work)
        future.add_done_callback(lambda _: self._waiting.put(None))
        try:
            while turns := self._take():
                self._sample(turns)
            return future.result()
        finally:
            future.cancel()

    def _take(self) -> list[Turn]:
        """The turns that wait, at least one; none when the dialogues have ended."""
        turns = []
        turn = self._next()
        while turn is not None:
            turns.append(turn)
            try:
                turn = self._waiting.get(timeout=0 if len(turns) >= self._open else self._collect_s)
            except queue.Empty:
                break
        return sorted(turns, key=lambda turn: turn.request.seeds)

    def _next(self) -> Turn | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            with waiting(lambda: f"the engine waits for the environments and tools of {self._open} dialogues", "turns"):
                return self._waiting.get()

    def _sample(self, turns: list[Turn]) -> None:
        start = time.perf_counter()
        while turns:
            sampling = turns[0].sampling
            same = [turn for turn in turns if turn.sampling == sampling]
            turns = [turn for turn in turns if turn.sampling != sampling]

            def deliver(number: int, _: int, completion: Completion, same: list[Turn] = same) -> None:
                same[number].delivered.set_result(completion)

            self._sampler.generate([turn.request for turn in same], sampling, deliver)
        self._collect_s = max(COLLECT_S, COLLECT_SHARE * (time.perf_counter() - start))
