"""Calls a reward term: where it is computed, its deadline, repeated calls, and what becomes of a failure."""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, NoReturn

from rft.errors import FunctionError
from rft.imports import import_part
from rft.ranges import PositiveInt, Range, Seconds
from rft.registry import take
from rft.remote.retry import Backoff, BreakerOptions
from rft.reward.build import build_term
from rft.reward.runners import InlineRunner, Outcomes, Runner
from rft.reward.sandbox.options import WorkerOptions
from rft.reward.term import LARGEST_SCORE, REASONS, Failure, Term, Unscored
from rft.reward.thought import Reading, ReadingOptions, split_node
from rft.sanitize import OTHER, Names, one_line
from rft.waits import waiting

Score = Annotated[float, Range(low=-LARGEST_SCORE, high=LARGEST_SCORE)]
Failed = Literal["drop_row", "drop_group", "stop"] | Score
Job = tuple[int, str, Mapping[str, Any]]  # the number of a response, the response, and the row that it answers
# Workers that are parts: the module, and its function with the arguments of `build`. Terms that name it import it.
WORKERS = {
    "sandbox": ("rft.reward.sandbox.workers.pool", "isolated"),
    "http": ("rft.reward.services.remote", "hosted"),
}
# Runners that are parts: those of call.workers=process, of a term that awaits and of one that waits in threads.
POOL = ("rft.reward.workers", "ForkedPool")
LOOP = ("rft.reward.async_runners", "LoopRunner")
THREADS = ("rft.reward.async_runners", "ThreadRunner")
PAUSES_S = (0.5, 60.0)  # the shortest and the longest pause before a repeated call


@dataclass
class HostOptions:
    """The servers that compute a term.

    Attributes:
        addresses: of the servers.
        token: the name of the environment variable with their bearer token, or None.
        rows_per_request: most responses of a request.
        breaker: when a server gets no requests.
    """

    addresses: list[str]
    token: str | None
    rows_per_request: PositiveInt
    breaker: BreakerOptions


@dataclass
class CallOptions:
    """How a reward term is called.

    Attributes:
        workers: `inline`, in the process of the run; `process`, in worker processes, which a deadline can end;
            `sandbox`, in worker processes that are isolated; `http`, on servers of mode=serve.
        concurrency: worker processes, or calls of an async function at the same time.
        deadline_s: seconds of one execution, without waiting for a free worker; None: no limit.
        tries: calls of one response.
        failed: what becomes of a response without a score: its row or its whole group does not train, it gets this
            number, or the run stops.
        sandbox: how workers are isolated.
        http: the servers.
    """

    workers: Literal["inline", "process", "sandbox", "http"]
    concurrency: PositiveInt
    deadline_s: Seconds | None
    tries: PositiveInt
    failed: Failed
    sandbox: WorkerOptions
    http: HostOptions


class Caller:
    """Calls one term of a reward.

    Attributes:
        term: the term in this process; it checks rows and extracts answers.
        failed: see `CallOptions`.
        workers, tries: see `CallOptions`.
        numbers: the names of the numbers beside the scores.
        concurrent: several calls may run at the same time.
        reading: which part of a response the term gets.

    Args:
        name: of the term.
        node: of the term in the yaml, without weight and call.
        call: of the term in the yaml.
        defaults: of the options that `call` leaves out.
        reading: of the options of reading that the node leaves out.

    Raises:
        ValueError: the term is malformed, or an option cannot have an effect on it; names the key.
    """

    def __init__(
        self,
        name: str,
        node: Mapping[str, Any],
        call: Mapping[str, Any],
        defaults: CallOptions,
        reading: ReadingOptions,
    ) -> None:
        self._key = f"reward.terms.{name}"
        node, reading, own = split_node(node, reading, self._key)
        options = CallOptions(
            **take(merged(asdict(defaults), call), CallOptions, f"{self._key}.call", "the call of a reward term")
        )
        _check_before(node, options, call, self._key)
        self.term, self.runner = build(name, node, self._key, options, reading)
        _check(self.term, options, call, self._key)
        self.reading = Reading(self.term, reading, self._key, own)
        self.failed: Failed = options.failed
        self.workers = options.workers
        self.concurrent = options.workers != "inline" or self.term.awaits
        self._name = name
        self.tries = options.tries
        self._logged: set[str] = set()
        self.numbers = Names(f"further numbers of {self._key}")
        self._reasons = Names(f"reasons of {self._key} for no score", REASONS)

    def begin(self) -> "Calls":
        """The calls of one round of responses."""
        reading = None if self.workers == "http" else self.reading  # the servers read whole responses in the same way
        return Calls(self._name, self.runner, self.term.rows_per_call, self.tries, self.term.collective, reading)

    def extract(self, response: str, row: Mapping[str, Any]) -> str | None:
        """The answer in a response to a row, see `Term.extract`; None where a thought of it does not end."""
        text, _ = self.reading.read(response, row)
        return None if text is None else self.term.extract(text)

    def reason(self, value: Unscored) -> str:
        """Why a response has no score, in one line. What stands before the first colon may be the name of a metric."""
        name, colon, rest = one_line(value.reason).partition(":")
        return f"{self._reasons.spell(name) or OTHER}{colon}{rest}"

    def report(self, outcomes: Sequence[Any], responses: Sequence[str]) -> None:
        """Logs the first failure of each reason; with `failed=stop` a response without a score stops the run.

        Raises:
            FunctionError: names the term, the row and the response.
        """
        for number, value in enumerate(outcomes):
            if isinstance(value, Unscored) and self.failed == "stop":
                self._stop(number, value, responses[number])
            elif isinstance(value, Failure) and value.reason not in self._logged:
                self._logged.add(value.reason)
                logging.getLogger(__name__).warning(
                    "the reward term %r gave no score to response %s: %s; further responses with the reason %s are "
                    "only counted", self._name, head(responses[number]), one_line(value.message), value.reason,
                )  # fmt: skip

    def _stop(self, number: int, value: Unscored, response: str) -> NoReturn:
        if isinstance(value, Failure) and value.error is not None and self.term.rows_per_call is None:
            raise value.error
        place = f"the reward term {self._name!r} failed on row {number}, response {head(response)}"
        if isinstance(value, Failure):
            raise FunctionError(f"{place}: {one_line(value.message)}") from value.error
        hint = f"{self._key}.call.failed=drop_row trains without such rows"
        raise FunctionError(f"{place}: no score ({self.reason(value)}); {hint}")


class Calls:
    """The calls of one term for one round of responses. `add` starts calls beside the main thread, where it can.

    Args:
        name: of the term.
        runner: of the term.
        size: most responses of one call; None: `finish` makes one call of all of them.
        tries: calls of one response until one succeeds.
        collective: every rank makes one call, also without responses.
        reading: which part of a response the term gets; None: all.
    """

    def __init__(
        self, name: str, runner: Runner, size: int | None, tries: int, collective: bool, reading: Reading | None
    ) -> None:
        assert not collective or (size is None and tries == 1), "all ranks make as many calls"
        self._name = name
        self._runner = runner
        self._reading = reading
        self._size = size
        self._tries = tries
        self._collective = collective
        self._unanswered: list[int] = []
        self._waiting: list[Job] = []
        self._running: list[tuple[list[Job], Future[Outcomes]]] = []

    @property
    def beside(self) -> bool:
        """Whether calls run while the main thread does other work."""
        return self._runner.beside

    def add(self, number: int, response: str, row: Mapping[str, Any]) -> None:
        """Adds a response.

        Args:
            number: of the response in the round.
            row: of the data set that it answers.
        """
        text, row = (response, row) if self._reading is None else self._reading.read(response, row)
        if text is None:
            self._unanswered.append(number)
            return
        self._waiting.append((number, text, row))
        if self._runner.beside and self._size is not None and len(self._waiting) >= self._size:
            self._submit()

    def start(self) -> None:
        """Starts the calls of all responses; none is added after it."""
        while self._waiting or (self._collective and not self._running):
            self._submit()

    def finish(self) -> dict[int, Any]:
        """The outcome of every response by its number: a value, or `Unscored`; 0 for one without an answer.

        Raises:
            FunctionError: the term returned more or fewer values than there were responses.
        """
        outcomes: dict[int, Any] = dict.fromkeys(self._unanswered, 0.0)
        pauses = Backoff(*PAUSES_S)
        for attempt in range(1, self._tries + 1):
            self.start()
            for job, outcome in self._collect():
                outcomes[job[0]] = outcome
                if isinstance(outcome, Failure) and outcome.repeatable and attempt < self._tries:
                    self._waiting.append(job)
            if not self._waiting:
                break
            time.sleep(pauses.next())
        return outcomes

    def cancel(self) -> None:
        """Gives up the calls that have not ended."""
        for _, future in self._running:
            future.cancel()
        self._running = []

    def _submit(self) -> None:
        jobs, self._waiting = self._waiting[: self._size], self._waiting[self._size or len(self._waiting) :]
        self._running.append((jobs, self._runner.submit([job[1] for job in jobs], [job[2] for job in jobs])))

    def _collect(self) -> list[tuple[Job, Any]]:
        """The responses of the calls that run, with their outcomes."""
        running, self._running = self._running, []

        def what() -> str:
            left = sum(not future.done() for _, future in running)
            return f"the run waits for {left} of {len(running)} calls of the reward term {self._name!r}"

        with waiting(what, f"reward {self._name}") if self._runner.beside else nullcontext():
            return [pair for jobs, future in running for pair in zip(jobs, future.result(), strict=True)]


def finish_all(calls: Mapping[str, Calls]) -> dict[str, dict[int, Any]]:
    """The outcomes of every term by the number of the response; terms beside the main thread run at the same time.

    Args:
        calls: of the terms, by name.
    """
    beside = {name: of_term for name, of_term in calls.items() if of_term.beside}
    for of_term in beside.values():
        of_term.start()
    with ThreadPoolExecutor(max(1, len(beside))) as threads:
        waiting = {name: threads.submit(of_term.finish) for name, of_term in beside.items()}
        outcomes = {name: of_term.finish() for name, of_term in calls.items() if name not in beside}
        outcomes |= {name: future.result() for name, future in waiting.items()}
    return {name: outcomes[name] for name in calls}


def head(response: str) -> str:
    """The beginning of a response, for messages."""
    return repr(response[:60] + "..." if len(response) > 60 else response)


def merged(defaults: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a node over their defaults, with those of nested nodes one by one."""
    options = {**defaults, **node}
    for name, default in defaults.items():
        if isinstance(default, Mapping) and isinstance(options[name], Mapping):
            options[name] = merged(default, options[name])
    return options


def build(
    name: str, node: Mapping[str, Any], key: str, options: CallOptions, reading: ReadingOptions
) -> tuple[Term, Runner]:
    """A term, and what runs its calls.

    Args:
        name: of the term.
        node: of the term in the yaml, without weight, call and options of reading.
        key: of the node.
        options: of its calls.
        reading: which part of a response the term gets.

    Raises:
        ValueError: the node is malformed; names the key.
    """
    if options.workers in WORKERS:
        build_part = import_part(*WORKERS[options.workers], f"{key}.call.workers={options.workers}")
        built: tuple[Term, Runner] = build_part(name, node, key, options, reading)
        return built
    term = build_term(node, key)
    if options.workers == "process":
        pool = import_part(*POOL, f"{key}.call.workers=process")
        return term, pool(name, node, key, options.concurrency, options.deadline_s)
    if term.awaits:
        return term, import_part(*LOOP, key)(term, name, options.concurrency, options.deadline_s)
    return term, import_part(*THREADS, key)(term, name) if term.threads else InlineRunner(term, name)


def _check_before(node: Mapping[str, Any], options: CallOptions, call: Mapping[str, Any], key: str) -> None:
    """Refuses a term that cannot be isolated, a missing deadline, and options of another kind of workers."""
    place = f"{key}.call"
    for kind in WORKERS:
        if kind in call and options.workers != kind:
            raise ValueError(f"{place}.{kind}: only call.workers={kind} reads it; set that, or remove it")
    if options.workers == "sandbox" and "_target_" in node:
        raise ValueError(
            f"{place}.workers=sandbox: this term is a class, so it is computed in the process of the run; remove it"
        )
    if options.workers in WORKERS and options.deadline_s is None:
        raise ValueError(
            f"{place}.workers={options.workers} needs a deadline, or one response could stop the run; set "
            f"{place}.deadline_s=10"
        )


def _check(term: Term, options: CallOptions, call: Mapping[str, Any], key: str) -> None:
    """Refuses options that have no effect on a term."""
    place = f"{key}.call"
    if options.workers == "process" and not term.in_workers:
        raise ValueError(
            f"{place}.workers=process: this term is no function, so it is computed in the process of the run; remove it"
        )
    if options.workers == "inline" and not term.awaits:
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
