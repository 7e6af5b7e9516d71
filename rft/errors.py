"""Reports all mistakes of a config at once: every check whose parts exist runs, then one error has all messages."""

import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LISTED = 5  # names in a message


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
    """The run has stopped after a step, with a checkpoint, because of a signal or `max_time`."""


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


class Checks:
    """Runs checks one after another and collects the messages of those that fail.

    Checks use parts, which `add` and `make` store by name. If a part could not be made, its message is stored, and the
    checks that need the part are skipped.

        checks = Checks()
        checks.add("metric", "accuracy")
        checks.make("reward", lambda: build_reward(node))  # checks.parts["reward"] is what the function returns
        checks.run(check_metric, "metric", "reward")       # calls check_metric(<the metric>, <the reward>)
        checks.end()                                       # raises Problems with all messages

    Attributes:
        messages: those of the checks that have failed so far.
        parts: the parts made so far, by name.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.parts: dict[str, Any] = {}
        self._failed: set[str] = set()

    def add(self, name: str, part: Any) -> None:
        """Stores a part."""
        self.parts[name] = part
        self._failed.discard(name)

    def fail(self, *names: str) -> None:
        """Marks parts as failed; the caller has stored the message."""
        self._failed |= set(names)

    def make(self, name: str, function: Callable[..., Any], *needs: str) -> None:
        """Stores what `function` returns as a part.

        Args:
            name: the name of the new part.
            function: takes the parts that it needs; raises a ValueError if something is wrong with them.
            needs: the names of these parts, in the order of the parameters.
        """
        self.fail(name)
        if self.has(*needs):
            try:
                self.add(name, function(*(self.parts[need] for need in needs)))
            except ValueError as error:
                self.messages += messages_of(error)

    def run(self, check: Callable[..., Iterable[str] | None], *needs: str) -> None:
        """Calls a check.

        Args:
            check: takes the parts that it needs; yields messages, or raises a ValueError, if something is wrong.
            needs: the names of these parts, in the order of the parameters.
        """
        if self.has(*needs):
            try:
                for message in check(*(self.parts[need] for need in needs)) or ():
                    self.messages.append(message)
            except ValueError as error:
                self.messages += messages_of(error)

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns; None if it raises a ValueError, whose message is stored."""
        try:
            return function(*arguments)
        except ValueError as error:
            self.messages += messages_of(error)
            return None

    def has(self, *names: str) -> bool:
        """Whether none of these parts has failed."""
        return self._failed.isdisjoint(names)

    def end(self) -> None:
        """Raises Problems if there are messages."""
        if self.messages:
            raise Problems(self.messages)


def build_each(build: Callable[[str, Any], Any], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """`build(name, node)` of every entry, by its name.

    Raises:
        Problems: the messages of all entries.
    """
    checks = Checks()
    found = {name: checks.attempt(build, name, node) for name, node in nodes.items()}
    checks.end()
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
