"""Lets many dialogues sample from one engine: their requests wait in a queue, and the main thread samples them."""

import asyncio
import queue
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from rft.remote.event_loop import EventLoop
from rft.rollout.engine.base import Completion, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler

T = TypeVar("T")
COLLECT_S = 0.003  # without a new request for so long, those that wait are sampled together


@dataclass(frozen=True)
class Turn:
    """A request for one completion, and where it is delivered.

    Attributes:
        request: with one seed.
        sampling: how it is sampled.
        loop: of the coroutine that waits.
        future: what it waits for.
    """

    request: Request
    sampling: Sampling
    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[Completion]"

    def deliver(self, completion: Completion) -> None:
        """Continues the dialogue. Any thread may call it."""
        self.loop.call_soon_threadsafe(self._settle, completion)

    def _settle(self, completion: Completion) -> None:
        if not self.future.done():  # a dialogue that took too long was cancelled
            self.future.set_result(completion)


class TurnQueue:
    """The requests of the dialogues of one rank.

    A dialogue awaits `sample` in the event loop; `serve` samples in the thread that calls it. Completions are delivered
    one by one as they finish, so that tools begin while others are still sampled, and a dialogue whose tool takes long
    delays no other. The engine finishes the requests that wait together before it begins the next ones.

    Args:
        loop: in which the dialogues run.
        sampler: samples the requests.
    """

    def __init__(self, loop: EventLoop, sampler: Sampler) -> None:
        self._loop = loop
        self._sampler = sampler
        self._waiting: queue.SimpleQueue[Turn | None] = queue.SimpleQueue()

    async def sample(self, prompt: list[int], seed: int, limit: int, sampling: Sampling) -> Completion:
        """Samples one completion. It depends on the arguments and the weights alone, not on other dialogues.

        Args:
            prompt: token ids.
            limit: most new tokens.
        """
        loop = asyncio.get_running_loop()
        turn = Turn(Request(prompt, [seed], [limit]), sampling, loop, loop.create_future())
        self._waiting.put(turn)
        return await turn.future

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
        found = self._waiting.get()
        while found is not None:
            turns.append(found)
            try:
                found = self._waiting.get(timeout=COLLECT_S)
            except queue.Empty:
                break
        return turns

    def _sample(self, turns: list[Turn]) -> None:
        while turns:
            sampling = turns[0].sampling
            same = [turn for turn in turns if turn.sampling == sampling]
            turns = [turn for turn in turns if turn.sampling != sampling]

            def deliver(number: int, _: int, completion: Completion, same: list[Turn] = same) -> None:
                same[number].deliver(completion)

            self._sampler.generate([turn.request for turn in same], sampling, deliver)
