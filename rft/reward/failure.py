"""What is left of a call that raised an error, and errors that no caller may keep."""

import builtins
from dataclasses import dataclass
from typing import Any

from rft.errors import FunctionError
from rft.reward.term import Unscored

REASONS = frozenset(  # that the run itself gives
    {"deadline", "worker_died", "no_workers", "memory", "output", "bad_answer", "none", "no_score"}
    | {"unreachable", "refused", "bad_response", "circuit_open"}
    | {name for name, value in vars(builtins).items() if isinstance(value, type)}
)


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
