"""Calls a reward term: where it is computed, its deadline, repeated calls, and what becomes of a failure."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from torch import Tensor

from rft.errors import FunctionError, naming
from rft.ranges import PositiveInt, Range, Seconds
from rft.registry import take
from rft.remote.retry import Backoff
from rft.reward.build import build_term
from rft.reward.failure import Failure, catching
from rft.reward.term import RowTerm, Term, Unscored
from rft.reward.workers import WorkerPool

LARGEST_SCORE = 1e15  # the sum of the squares of a hundred million such scores is a float32 number
Score = Annotated[float, Range(low=-LARGEST_SCORE, high=LARGEST_SCORE)]
PAUSES_S = (0.5, 60.0)  # the shortest and the longest pause before a repeated call


@dataclass
class CallOptions:
    """How a reward term is called; the yaml documents each option.

    Attributes:
        workers: `inline`, in the process of the run; `process`, in worker processes, which a deadline can end.
        concurrency: worker processes, or calls of an async function at the same time.
        deadline_s: seconds of one execution, without waiting for a free worker; None: no limit.
        tries: calls of one response.
        failed: what becomes of a response without a score: its row or its whole group does not train, it gets this
            number, or the run stops.
    """

    workers: Literal["inline", "process"]
    concurrency: PositiveInt
    deadline_s: Seconds | None
    tries: PositiveInt
    failed: Literal["drop_row", "drop_group", "stop"] | Score


class Caller:
    """Calls one term of a reward.

    Attributes:
        term: the term in this process; it checks rows and extracts answers.
        failed: see `CallOptions`.
        beside: the calls run in a thread beside those of other terms.

    Args:
        name: of the term.
        node: of the term in the yaml, without weight and call.
        call: of the term in the yaml.
        defaults: of the options that `call` leaves out.

    Raises:
        ValueError: the term is malformed, or an option cannot have an effect on it; names the key.
    """

    def __init__(self, name: str, node: Mapping[str, Any], call: Mapping[str, Any], defaults: CallOptions) -> None:
        key = f"reward.terms.{name}"
        self.term = build_term(node, key)
        options = CallOptions(
            **take({**asdict(defaults), **call}, CallOptions, f"{key}.call", "the call of a reward term")
        )
        _check(self.term, options, call, key)
        self.failed = options.failed
        self._name = name
        self._key = key
        self._options = options
        self._pool = None
        if options.workers == "process":
            self._pool = WorkerPool(node, key, options.concurrency, options.deadline_s)

    @property
    def beside(self) -> bool:
        """See the class."""
        return self._pool is not None or self.term.waits or _awaits(self.term)

    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        """A value, or `Unscored`, of each of N responses; see `Term.values`.

        Raises:
            FunctionError: with `failed=stop` a response got no score; names the term, the row and the response.
        """
        found: list[Any] = self._call(responses, rows)
        pauses = Backoff(*PAUSES_S)
        for _ in range(self._options.tries - 1):
            again = [number for number, value in enumerate(found) if isinstance(value, Failure)]
            if not again:
                break
            time.sleep(pauses.next())
            repeated = self._call([responses[number] for number in again], [rows[number] for number in again])
            for number, value in zip(again, repeated, strict=True):
                found[number] = value
        if self.failed == "stop":
            self._refuse(found, responses)
        return found

    def _call(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        if not responses:
            return []
        if self._pool is not None:
            return self._in_workers(self._pool, responses, rows)
        if _awaits(self.term):
            return asyncio.run(self._await_all(responses, rows))
        if isinstance(self.term, RowTerm):
            return [self._attempt(self.term, response, row) for response, row in zip(responses, rows, strict=True)]
        return self._batch(responses, rows)

    def _in_workers(self, pool: WorkerPool, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        if self.term.unit == "row":
            return pool.run(list(zip(responses, rows, strict=True)))
        (found,) = pool.run([(list(responses), list(rows))])
        return [found] * len(responses) if isinstance(found, Unscored) else self._counted(found, responses)

    async def _await_all(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        slots = asyncio.Semaphore(self._options.concurrency)

        async def one(response: str, row: Mapping[str, Any]) -> Any:
            assert isinstance(self.term, RowTerm)
            async with slots:
                with catching() as caught:
                    async with asyncio.timeout(self._options.deadline_s) as limit:
                        return await self.term.value(response, row)
            if limit.expired():
                return Failure("deadline", f"not done in deadline_s={self._options.deadline_s:g}")
            return caught.failure

        return await asyncio.gather(*(one(*pair) for pair in zip(responses, rows, strict=True)))

    def _attempt(self, term: RowTerm, response: str, row: Mapping[str, Any]) -> Any:
        with catching() as caught:
            return term.value(response, row)
        return caught.failure

    def _batch(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
        with catching() as caught, naming(f"the reward term {self._name!r}", type(self.term).values):
            found = self.term.values(responses, rows)
        if caught.failure is not None:
            if self.failed == "stop" and caught.failure.error is not None:
                raise caught.failure.error
            return [caught.failure] * len(responses)
        return self._counted(found, responses)

    def _counted(self, found: Any, responses: Sequence[str]) -> list[Any]:
        values = list(found) if isinstance(found, Sequence | Tensor) and not isinstance(found, str) else [found]
        if len(values) != len(responses):
            raise FunctionError(
                f"the reward term {self._name!r} gave {len(values)} scores for {len(responses)} responses"
            )
        return values

    def _refuse(self, found: Sequence[Any], responses: Sequence[str]) -> None:
        for number, value in enumerate(found):
            if isinstance(value, Unscored):
                place = f"the reward term {self._name!r} failed on row {number}, response {head(responses[number])}"
                if isinstance(value, Failure):
                    raise FunctionError(f"{place}: {value.message}") from value.error
                hint = f"{self._key}.call.failed=drop_row trains without such rows"
                raise FunctionError(f"{place}: no score ({value.reason}); {hint}")


def call_beside(callers: Mapping[str, Caller], jobs: Mapping[str, tuple[Any, Any]]) -> dict[str, list[Any]]:
    """The values of every term; terms that wait for other processes are called at the same time as the others.

    Args:
        callers: of the terms, by name.
        jobs: the responses and their rows, by the name of the term that scores them.
    """
    with ThreadPoolExecutor(max(1, len(callers))) as threads:
        waiting = {name: threads.submit(one.values, *jobs[name]) for name, one in callers.items() if one.beside}
        found = {name: one.values(*jobs[name]) for name, one in callers.items() if not one.beside}
        found |= {name: future.result() for name, future in waiting.items()}
    return {name: found[name] for name in callers}


def head(response: str) -> str:
    """The beginning of a response, for messages."""
    return repr(response[:60] + "..." if len(response) > 60 else response)


def _awaits(term: Term) -> bool:
    return isinstance(term, RowTerm) and term.awaits


def _check(term: Term, options: CallOptions, call: Mapping[str, Any], key: str) -> None:
    """Refuses options that have no effect on a term."""
    place = f"{key}.call"
    if options.workers == "process" and term.unit is None:
        raise ValueError(
            f"{place}.workers=process: this term is no function, so it is computed in the process of the run; remove it"
        )
    if options.workers == "inline" and not _awaits(term):
        if options.deadline_s is not None:
            raise ValueError(
                f"{place}.deadline_s={options.deadline_s:g}: nothing can stop a function in the process of the run; "
                "set call.workers=process for this term, or write the function as `async def`"
            )
        if "concurrency" in call:
            raise ValueError(
                f"{place}.concurrency={options.concurrency}: one call runs at a time in the process of the run; set "
                "call.workers=process for this term, or remove it"
            )
