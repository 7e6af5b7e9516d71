"""Tests and the program under test in two processes of two sandboxes, which exchange calls and values as JSON.

Its source is sent to both sandboxes. The program sees the arguments of calls, neither the tests nor the verdict.
It cannot patch them, and its objects do not reach them. A value crosses as plain data of Python, with its type.
"""

import builtins
import json
import os
import sys
import types
from typing import Any

MOST = 1 << 24  # bytes of one value
NAME = "program"
MARK = "__check_runs__"  # the name of a function that the tests call where a check begins
NOT_RAISED = (StopIteration, StopAsyncIteration, ExceptionGroup)  # two end an iterator, one has no message alone


class ProgramError(Exception):
    """The program raised an error, ended, or returned what is no plain data."""


class TestsError(Exception):
    """The tests pass to the program what is no plain data, so they cannot run apart from it."""


def error_of(kind: object) -> Exception:
    """An error of the program as its tests see it: of the same type if that is a built-in one, else `ProgramError`.

    So is one that steers the caller: `for x in map(f, xs)` takes a StopIteration of f for the end of xs.

    Args:
        kind: the name of the type, as the program gives it.
    """
    builtin = vars(builtins).get(kind) if isinstance(kind, str) else None
    if not isinstance(builtin, type) or not issubclass(builtin, Exception) or issubclass(builtin, NOT_RAISED):
        return ProgramError(f"{kind}")
    return builtin.__new__(builtin, kind)  # __init__ of some takes more than a message


class catching:
    """Keeps the error that is raised in the block: programs and tests may raise anything.

    Attributes:
        error: None if the block has raised nothing.
    """

    error: BaseException | None = None

    def __enter__(self) -> "catching":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        self.error = error
        return isinstance(error, Exception | SystemExit)


def encode(value: Any) -> Any:
    """A value in the types of JSON: None, booleans, numbers and texts as they are, lists as lists, others tagged.

    Raises:
        TypeError: a value of another type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    raise TypeError(f"a {type(value).__name__} is no plain data")


def decode(value: Any) -> Any:
    """The inverse of `encode`; raises an error for anything else."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item) for item in content)


def take(number: int) -> int:
    """A copy of a stream; what the program or the tests print or read themselves is lost."""
    copy, nothing = os.dup(number), os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, number)
    os.close(nothing)
    return copy


def answer_calls(program: str) -> None:
    """Runs in the sandbox of the program: reads calls from stdin, and writes their values to stdout."""
    calls, values = os.fdopen(take(0), "rb"), take(1)
    module = types.ModuleType(NAME)
    sys.modules[NAME] = module
    names = module.__dict__
    exec(compile(program, f"{NAME}.py", "exec"), names)
    for line in calls:
        name, args, options = json.loads(line)
        with catching() as caught:
            function = names[name] if name in names or "Solution" not in names else getattr(names["Solution"](), name)
            answer = ["value", encode(function(*decode(args), **decode(options)))]
        if caught.error is not None:
            answer = ["error", type(caught.error).__name__]
        text = f"{json.dumps(answer)}\n".encode()
        while text:
            text = text[os.write(values, text) :]


class Candidate:
    """A function of the program, in the process of the tests.

    Args:
        name: of the function.
        calls: a descriptor, for calls.
        values: a file, with their values.

    Attributes:
        called: the program has got a call.
    """

    def __init__(self, name: str, calls: int, values: Any) -> None:
        self.__name__ = name
        self.called = False
        self._calls = calls
        self._values = values

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The value of a call; an error of the program has the type of a built-in error, if it is one."""
        try:
            text = f"{json.dumps([self.__name__, encode(list(args)), encode(options)])}\n".encode()
        except TypeError as error:
            raise TestsError(str(error)) from error
        self.called = True
        with catching() as caught:
            while text:
                text = text[os.write(self._calls, text) :]
            line = self._values.readline(MOST)
            kind, content = json.loads(line)
            found = decode(content)
        if caught.error is not None:
            raise ProgramError(f"{self.__name__} gave no value: {caught.error!r}") from caught.error
        if kind == "value":
            return found
        raise error_of(found)


def run_tests(setup: str, tests: list[str], names: list[str], has_assert: bool) -> None:
    """Runs in the sandbox of the tests: writes the number of each that passes, or why they cannot run, to stderr.

    Args:
        setup: imports and functions of the tests.
        tests: statements; one passes if it raises no error and, with `has_assert`, has called `MARK`.
        names: of functions of the program.
        has_assert: the tests have an assert statement; see `mark_checks`.
    """
    calls, values, verdicts = take(1), os.fdopen(take(0), "rb"), take(2)
    module = types.ModuleType("tests")
    candidates = {name: Candidate(name, calls, values) for name in names}
    module.__dict__.update(candidates)
    marks: list[bool] = []
    module.__dict__[MARK] = lambda: marks.append(True)

    def report(value: object) -> None:
        os.write(verdicts, f"{json.dumps(value)}\n".encode())

    with catching() as caught:
        exec(compile(setup, "setup", "exec"), module.__dict__)
    if caught.error is not None:
        if not any(candidate.called for candidate in candidates.values()):  # so no program causes it
            report(f"{type(caught.error).__name__}: {caught.error}")
        os._exit(0)
    for number, test in enumerate(tests):
        marks.clear()
        with catching() as caught:
            exec(compile(test, f"test {number}", "exec"), module.__dict__)
        if caught.error is None and (marks or not has_assert):
            report(number)
        elif isinstance(caught.error, TestsError):
            report(str(caught.error))
    os._exit(0)
