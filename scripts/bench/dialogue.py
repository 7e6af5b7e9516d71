"""Episodes with an engine that answers at once: turns per second, and what sleeping tools add."""

import argparse
import random
import time
from typing import Any

from rich.console import Console

from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.rollout.answerer import RowRequests
from rft.rollout.engine.base import Completion, Request
from rft.rollout.engine.sampling import Sampling
from rft.rollout.environment.episodes import EpisodeAnswerer
from rft.rollout.environment.options import EnvironmentOptions, Environments
from rft.rollout.sampler import Sampler

CALL = "?1*1"
SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, stop=[], first_token=None)


class ScriptedSampler(Sampler):
    """Calls the tool in every turn but the last.

    Args:
        calls: of an episode.
        tokens: of a call, and of an answer without one.
        end: the end token.
    """

    def __init__(self, calls: int, tokens: tuple[list[int], list[int]], end: int) -> None:
        self._calls = calls
        self._tokens = tokens
        self._end = end

    def generate(self, requests: list[Request], sampling: Sampling, on_completion: Any = None) -> Any:
        """See `Sampler.generate`."""
        found = []
        for number, request in enumerate(requests):
            last = request.prompt.count(self._end) == self._calls
            ids = [*self._tokens[last], self._end]
            completion = Completion(ids, [0.0] * len(ids), "stop", "1" if last else CALL, [0] * len(ids))
            on_completion(number, 0, completion)
            found.append([completion])
        return found

    def publish(self, version: int, weights: Any, model: str = "actor") -> None:
        """Has no weights."""

    def release(self) -> None:
        """Has no memory."""


class Sleeper:
    """A calculator that takes as long as the row says."""

    def reset(self, seconds: float, **row: Any) -> None:
        """Begins an episode."""
        self._seconds = seconds

    def calculate(self, expression: str) -> str:
        """Computes an expression.

        Args:
            expression: with numbers.
        """
        if self._seconds:
            time.sleep(self._seconds)
        return "1"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the section."""
    parser.add_argument("--dialogues", type=int, default=256, help="at the same time (default: 256)")
    parser.add_argument("--turns", type=int, default=10, help="of each, the last without a tool (default: 10)")
    parser.set_defaults(run=measure)


def measure(arguments: argparse.Namespace) -> None:
    """Prints turns per second, and the seconds of dialogues with sleeping tools against those of the slowest one."""
    console = Console()
    count, turns = arguments.dialogues, arguments.turns
    seconds = _seconds([0.0] * count, turns)
    console.print(f"tools that return at once: {count * turns / seconds:,.0f} turns/s ({count} dialogues of {turns})")
    rng = random.Random(0)
    sleeps = [rng.uniform(0.05, 0.5) for _ in range(count)]
    slowest, seconds = max(sleeps) * (turns - 1), _seconds(sleeps, turns)
    console.print(
        f"tools that sleep 0.05 to 0.5 s: {seconds:.2f} s, {seconds / slowest:.3f} times the slowest dialogue's sleep "
        f"({slowest:.2f} s)"
    )


def _seconds(sleeps: list[float], turns: int) -> float:
    tokenizer = characters(alphabet="0123456789*=?")
    options = EnvironmentOptions(
        classes={"sleeper": {"_target_": f"{__name__}.Sleeper"}},
        tool_format={"name": "mark", "marks": {"?": "calculate"}},
        max_turns=turns,
        max_tokens=1_000_000,
        max_seconds=None,
        tool_deadline_s=60.0,
        tool_max_tokens=64,
        workers="inline",
        concurrency=len(sleeps),
        renderer=None,
    )
    encoder = Encoder(tokenizer, "turns", None)
    call, answer = (list(ids) for ids in encoder.encode([CALL, "1"]))
    sampler = ScriptedSampler(turns - 1, (call, answer), tokenizer.eos_token_id)
    answerer = EpisodeAnswerer(Environments.of(options), encoder, sampler, 10_000_000)
    rows = [{"prompt": "1*1=", "seconds": seconds} for seconds in sleeps]
    start = time.perf_counter()
    asked = RowRequests(rows, [[number] for number in range(len(rows))], SAMPLING)
    found = answerer.answer(asked, lambda *_: None)
    seconds = time.perf_counter() - start
    assert all(trajectory.turns == turns for [trajectory] in found)
    return seconds
