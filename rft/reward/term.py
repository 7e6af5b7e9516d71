"""The base classes of reward terms; the yaml names a term's class by `_target_`. And the registry of functions.

A function is f(response, row, *, options) -> float. It receives the text of the response without the prompt, and the
row of the data set. Facts: `reads`, the fields of the row that it needs; `extract`, f(response, options) -> str or
None, the answer in a response: equal answers have equal texts, for a majority vote; `gold`, f(row, options), which
raises a ValueError if no response can be right: the run calls it for every row before it loads a model; `writes`,
f(row, options) -> list of texts, right responses in several writings; `others`, the score of such a response on a row
with another answer, see `Term`. mode=verify checks the last two. `thoughts` and `opening` say which part of a response
with thoughts the function gets, see `Term`. `tool_calls` is the format of the tool calls that it reads, see `Term`.
"""

import asyncio
import builtins
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rft.batch.row_fields import row_of_user
from rft.errors import FunctionError
from rft.registry import Plugin, Registry
from rft.sanitize import Names

if TYPE_CHECKING:  # worker processes start without torch
    import torch

    from rft.distributed import World
    from rft.strategy.base import Strategy

LARGEST_SCORE = 1e15  # the sum of the squares of a hundred million such scores is a float32 number
Offload = Literal["cpu", "disk"] | None  # where the weights of a reward model are while it does not compute
REASONS = frozenset(  # that the run itself gives
    {"deadline", "worker_died", "no_workers", "memory", "output", "bad_answer", "none", "no_score"}
    | {"unreachable", "refused", "bad_response", "circuit_open"}
    | {name for name, value in vars(builtins).items() if isinstance(value, type)}
)
REWARDS = Registry(
    "reward",
    functions=("extract", "gold", "writes"),
    reads=(),
    extract=None,
    gold=None,
    writes=None,
    others="zero",
    thoughts="keep",
    opening=None,
    tool_calls=None,
)


@dataclass(frozen=True)
class Unscored:
    """In place of a score: the term could not judge a response. The row does not train, and no score is invented.

    Attributes:
        reason: the cause in a few words; the run counts rows by what stands before the first colon.
    """

    reason: str


class Term(ABC):
    """A term of a `WeightedSum`. The constructor loads nothing, so that a config is checked by building it.

    Attributes:
        reads: the fields of a row that the term needs.
        extracts: `extract` returns answers.
        rows_per_call: most responses of one call of `values`; None: all responses of a step are one call.
        awaits: `values` returns an awaitable. Calls are made while other responses are sampled and scored.
        threads: `values` waits for other processes: so many calls are made at the same time, while other responses are
            sampled and scored. 0: one call at a time, in the main thread.
        in_workers: the term may be computed in worker processes.
        has_model: `values` computes with a model on the device of the run.
        shards: `shard` can spread this model over the ranks.
        collective: `values` is a collective: every rank calls it once in each round of responses, also without any.
        thoughts: what the term gets of a response with thoughts, see `rft.reward.thought`. `keep`: the response as it
            is. `skip`: the answer, which is the text behind the thoughts; a response without one has the score 0, and
            the term does not see it. `show`: the response, behind the opening mark if the prompt ends with one.
        opening: with `show`, the mark that `prompt_opens=true` means; None: the first of `reasoning`.
        tool_calls: the format of the tool calls that the term reads, an entry of `rft.data.tool_calls.TOOL_CALLS`; None
            if it reads none. The texts of responses must keep its `marks`, and with `skip` it decides where a call
            begins, whose text opens no thought.
        others: the score of a response that is right for a row with another answer: `zero`; `less` than 1, since a
            response may be right in part; `any`.
    """

    reads: tuple[str, ...] = ()
    extracts: bool = False
    rows_per_call: int | None = None
    awaits: bool = False
    threads: int = 0
    in_workers: ClassVar[bool] = False
    has_model: ClassVar[bool] = False
    shards: ClassVar[bool] = False
    collective: bool = False
    thoughts: Literal["keep", "skip", "show"] = "keep"
    opening: str | None = None
    tool_calls: Plugin | None = None
    others: Literal["zero", "less", "any"] = "zero"

    def state_as(self, other: "Term") -> None:
        """States the same of rows and responses as another term, whose values this one gets elsewhere."""
        self.reads, self.extracts, self.others = other.reads, other.extracts, other.others
        self.thoughts, self.opening, self.tool_calls = other.thoughts, other.opening, other.tool_calls

    def check(self) -> None:
        """Checks that what the term will load exists, before any model is loaded.

        Raises:
            ValueError: names the key and the cure.
        """

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks that a response to this row of the data set can be right.

        Raises:
            ValueError: names the field and the cure.
        """

    def gold_responses(self, row: Mapping[str, Any]) -> Sequence[str]:
        """Responses to a row that have the score 1, in several writings; none if the row does not say what is right."""
        return ()

    def place(self, device: "torch.device", offload: Offload) -> None:
        """Sets the device of the computation, and where a model is outside of `values`; called before `values`."""

    def shard(self, world: "World", make: "Callable[[str], Strategy]") -> None:
        """Spreads the model over the ranks from now on, so that `values` is a collective; called before `values`.

        Args:
            world: all processes.
            make: makes the strategy that computes in the dtype of this name.
        """
        raise NotImplementedError(f"{type(self).__name__} states shards=False")

    @abstractmethod
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
        """The values of N responses.

        Args:
            responses: N texts, without their prompts.
            rows: the N rows of the data set that they answer.

        Returns:
            For each response a number, `Unscored`, or a mapping with the number as `score`, whose other numbers the
            run logs as `reward/<term>/<name>`. If the term awaits, an awaitable of this list.
        """

    def extract(self, response: str) -> str | None:
        """The answer in a response, None where there is none; equal answers have equal texts."""
        return None


class RowTerm(Term):
    """A term that scores each response by itself. If it awaits, `value` returns an awaitable."""

    rows_per_call: int | None = 1
    in_workers: ClassVar[bool] = True

    @abstractmethod
    def value(self, response: str, row: Mapping[str, Any]) -> Any:
        """The value of one response; see `Term.values`."""

    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
        values = [self.value(response, row) for response, row in zip(responses, rows, strict=True)]
        return _await_all(values) if self.awaits else values


def values_of(term: Term, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Any:
    """`Term.values` of `row_of_user` of the rows: a term that changes its rows changes those of no other call."""
    return term.values(responses, [row_of_user(row) for row in rows])


async def _await_all(values: Sequence[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*values)


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor of torch, which workers do not import unless the function does."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor)


def number_of(outcome: Any) -> Any:
    """The value itself, or the entry `score` of a mapping."""
    return outcome["score"] if isinstance(outcome, Mapping) and "score" in outcome else outcome


def further_numbers(outcomes: Sequence[Any], names: Names) -> dict[str, list[float]]:
    """The numbers beside `score` in the mappings that a term returned for N responses, by name, N each; NaN where there
    is none.

    Args:
        names: of the term, as metrics have them.
    """
    columns: dict[str, list[float]] = {}
    for number, outcome in enumerate(outcomes):
        for name, value in outcome.items() if isinstance(outcome, Mapping) else ():
            if name == "score" or (further := as_number(value)) is None:
                continue
            if (spelled := names.spell(name)) is not None:
                columns.setdefault(spelled, [math.nan] * len(outcomes))[number] = further
    return columns


def is_score(value: Any) -> bool:
    """Whether a term's value is a finite number that is small enough."""
    number = as_number(value)
    return number is not None and abs(number) <= LARGEST_SCORE


def as_number(value: Any) -> float | None:
    """A number of python, numpy or torch as a float; None for anything else, text included."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


@dataclass(frozen=True)
class Failure(Unscored):
    """In place of a score: a call that raised an error.

    Attributes:
        message: the error, with the line of the user's function.
        error: itself, where it was raised in this process.
        repeatable: the same call may succeed when it is repeated.
    """

    message: str
    error: Exception | None = None
    repeatable: bool = True


class CollectiveError(RuntimeError):
    """A rank left a collective by an error while others wait. It ends the run for every value of `call.failed`."""


class leaving_collective:
    """An error that is raised in the block becomes a `CollectiveError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            raise CollectiveError(f"{type(error).__name__}: {error}") from error


class catching:
    """Keeps the error that is raised in the block: a function may raise anything, and its caller decides about it.

    A `CollectiveError` is not kept.

    Attributes:
        failure: None if the block has raised nothing.
    """

    failure: Failure | None = None

    def __enter__(self) -> "catching":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if error is not None and any(isinstance(one, CollectiveError) for one in (error, error.__cause__)):
            return False
        if isinstance(error, SystemExit):
            self.failure = Failure("SystemExit", f"SystemExit: {error}")
        elif isinstance(error, FunctionError):  # it names the user's function and its line already
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            self.failure = Failure(type(cause).__name__, str(error), cause)
        elif isinstance(error, Exception):
            self.failure = Failure(type(error).__name__, f"{type(error).__name__}: {error}", error)
        return self.failure is not None
