"""Reports all mistakes of a config at once: every check whose parts exist runs, then one error has all messages."""

import difflib
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

LISTED = 5  # names in a message
T = TypeVar("T")
Check = Callable[[], Iterable[str] | None]  # yields messages, or raises a ValueError, if something is wrong


class Problems(ValueError):
    """The messages of several checks.

    Attributes:
        messages: one for every mistake, each with its key and cure.
    """

    def __init__(self, messages: Iterable[str]) -> None:
        self.messages = list(messages)
        super().__init__("\n".join(self.messages))

    def __reduce__(self) -> tuple[type["Problems"], tuple[list[str]]]:
        return Problems, (self.messages,)  # pickled when it is sent to other ranks


class FunctionError(ValueError):
    """A function that the config names has raised an error during a step, or returned what it must not."""


class Stopped(BaseException):
    """The run has stopped after a step, with a checkpoint: it can be continued.

    Attributes:
        step: the last one.
        cause: a signal such as `SIGTERM`, or `max_time=3h50m`.
    """

    def __init__(self, step: int, cause: str) -> None:
        super().__init__(step, cause)
        self.step, self.cause = step, cause

    def __str__(self) -> str:
        return f"stopped by {self.cause} after step {self.step}, with a checkpoint; the same command continues the run"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`"; did you mean X?"`, or an empty text if no known name is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def describe(error: BaseException, file: str) -> str:
    """`my_losses.py:12: ZeroDivisionError: division by zero`: an error at its last frame in the folder of a file."""
    frames = traceback.extract_tb(error.__traceback__)
    folder = Path(file).parent if file else Path("/nowhere")
    own = [frame for frame in frames if folder in Path(frame.filename).parents]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno}: " if own else ""
    return f"{place}{type(error).__name__}: {error}".rstrip(": ")


@contextmanager
def surviving(what: str, warn: Callable[[str], None]) -> Iterator[None]:
    """An error in the block, which writes or closes what no training needs, becomes a warning that begins with `what`.

    Args:
        warn: gets the error with its place in this package.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a report, a logger or an engine may raise anything
        warn(f"{what} failed; training does not depend on it: {describe(error, __file__)}")


def without_code(error: Exception, key: str, reason: str) -> str:
    """Why transformers cannot read a folder: its reason, or that the folder needs code of its own.

    Args:
        key: the yaml key of the model; its option `trust_remote_code` allows the code.
        reason: that is in the message otherwise.
    """
    if "trust_remote_code" not in str(error):
        return reason
    return (
        "it needs python files of its own, named by auto_map in its config, which would run with all rights of this "
        f"process; read them, then set {key}.trust_remote_code=true, or choose another model"
    )


def spell_type(value: Any) -> str:
    """What a function returned, for messages: `a tuple of (Tensor, Tensor)`, `a NoneType`."""
    if isinstance(value, tuple):
        return f"a tuple of ({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"


class naming:
    """An error that a user's function raises in the block becomes a FunctionError with the title and the line.

    Errors of functions of this package pass: they name the key themselves, or are bugs, which need a traceback.
    """

    def __init__(self, title: str, function: Callable[..., Any]) -> None:
        self.title = title
        self.module = function.__module__

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and self.module.split(".")[0] != __package__:
            file = vars(sys.modules[self.module]).get("__file__") or ""
            raise FunctionError(f"{self.title} failed: {describe(error, file)}") from error


@contextmanager
def at_step(step: int) -> Iterator[None]:
    """A FunctionError raised in the block names the step."""
    try:
        yield
    except FunctionError as error:
        raise FunctionError(f"step {step}: {error}") from error.__cause__


@contextmanager
def prefixed(start: str) -> Iterator[None]:
    """Puts a text in front of the message of a ValueError raised in the block, such as the place of a row."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{start}{error}") from error


class Unmade(Exception):
    """A part could not be made. Its mistakes are collected already, and what reads it is skipped."""


class Checks:
    """Runs checks one after another and collects the messages of those that fail.

    Attributes:
        messages: those of the checks that have failed so far.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []

    def run(self, check: Callable[..., Iterable[str] | None], *arguments: Any) -> None:
        """Calls a check; one that reads an unmade part is skipped.

        Args:
            check: yields messages, or raises a ValueError, if something is wrong.
        """
        try:
            for message in check(*arguments) or ():
                self.messages.append(message)
        except Unmade:
            pass
        except ValueError as error:
            self.messages += messages_of(error)

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns; None if it raises a ValueError, whose message is stored."""
        try:
            return function(*arguments)
        except ValueError as error:
            self.messages += messages_of(error)
            return None

    def end(self) -> None:
        """Raises Problems if there are messages."""
        if self.messages:
            raise Problems(self.messages)


class Checked:
    """An object whose parts and checks are methods; all mistakes in them are collected.

        class Shop(Checked):
            @part
            def price(self) -> int:
                return int(self.text)  # made once; a ValueError is collected

            @checks
            def sums(self) -> Iterator[Check]:
                yield lambda: check_price(self.price)  # skipped if there is no price

    Args:
        check: collects the mistakes; by default a new one.

    Attributes:
        check: has the messages of all mistakes so far; `check.end` raises them.
    """

    def __init__(self, check: Checks | None = None) -> None:
        self.check = Checks() if check is None else check
        self.unmade = set[str]()

    def check_all(self) -> None:
        """Makes all parts and runs all checks in the order of their definitions, those of base classes first."""
        for kind in reversed(type(self).__mro__):
            for name, member in vars(kind).items():
                if isinstance(member, part):
                    self.if_made(partial(getattr, self, name))
                elif isinstance(member, checks):
                    for check in member.listed(self):
                        self.check.run(check)

    def if_made(self, read: Callable[[], T]) -> T | None:
        """What `read` returns; None if it reads an unmade part."""
        try:
            return read()
        except Unmade:
            return None


class part(Generic[T]):
    """An attribute that its method makes when it is first read.

    If the method raises a ValueError, the message is collected. Every read then raises `Unmade`.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self.make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type[Checked], name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: type) -> T:
        if self.name in owner.unmade:
            raise Unmade(self.name)
        owner.unmade.add(self.name)
        try:
            made = self.make(owner)
        except ValueError as error:
            owner.check.messages += messages_of(error)
            raise Unmade(self.name) from error
        owner.unmade.remove(self.name)
        vars(owner)[self.name] = made
        return made


class checks:
    """A method that yields checks, functions without arguments; each is run alone."""

    def __init__(self, listed: Callable[[Any], Iterable[Check]]) -> None:
        self.listed = listed


def build_each(build: Callable[[str, Any], Any], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """`build(name, node)` of every entry, by its name.

    Raises:
        Problems: the messages of all entries.
    """
    check = Checks()
    found = {name: check.attempt(build, name, node) for name, node in nodes.items()}
    check.end()
    return found


def messages_of(error: ValueError) -> list[str]:
    """One message for every mistake."""
    return error.messages if isinstance(error, Problems) else [str(error)]


def listed(names: Sequence[str], most: int = LISTED) -> str:
    """The first names of a list, and how many follow."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def report_to_torchrun(message: str, late: bool) -> None:
    """Writes the error of this rank to the file that torchrun prints last; it prints the earliest as the cause.

    Args:
        late: the error follows from that of another rank.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time()) + late)}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def same_command(mode: str) -> str:
    """The command of this process with another mode."""
    words = [word for word in sys.argv[1:] if not word.startswith("mode=")]
    return shlex.join(["python", "-m", "rft.main", *words, f"mode={mode}"])
