"""Cases of a program as a row of a data set has them."""

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rft.reward.sandbox.isolation.harness import plain

Asserts = Literal["compared", "inside"]
FORMS = (
    "write a list of {input, output}, of {function, args, expected}, of {call, expected} or of assert statements, or "
    "{inputs, outputs} with or without fn_name"
)


@dataclass(frozen=True)
class StdinCase:
    """A run of the program: what it reads from stdin, and what it must print."""

    input: str
    output: str


@dataclass(frozen=True)
class Call:
    """A value that the harness computes in the sandbox.

    Attributes:
        request: {function, args} or {expression}, for the harness.
        accepted: the values of which it must equal one; they stay outside.
    """

    request: dict[str, Any]
    accepted: list[Any]


@dataclass(frozen=True)
class Cases:
    """The tests of a row: runs or calls.

    Attributes:
        runs: each is a run of the program.
        calls: all are evaluated in one run of the program.
        setup: imports in front of the calls.
    """

    runs: tuple[StdinCase, ...] = ()
    calls: tuple[Call, ...] = ()
    setup: str = ""


def read_tests(value: Any, field: str, asserts: Asserts) -> Cases:
    """The tests in a field of a row.

    Args:
        value: of the field: a list, a mapping, or a text with JSON or with assert statements.
        field: its name, for messages.
        asserts: `compared` takes those alone whose expected value stays outside the sandbox.

    Raises:
        ValueError: there is no test, or its form is not known; names the field and the cure.
    """
    try:
        tests = _read(value, asserts)
    except (KeyError, TypeError, ValueError, SyntaxError, RecursionError) as error:
        what = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"the field {field!r} has no tests that can be read ({what}); {FORMS}") from error
    if not tests.runs and not tests.calls:
        raise ValueError(f"the field {field!r} has no tests, so no program is right; {FORMS}, or remove the row")
    return tests


def _read(value: Any, asserts: Asserts) -> Cases:
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            return _assertions(value, asserts)
        if isinstance(parsed, str):
            raise ValueError("a JSON text")
        return _read(parsed, asserts)
    if isinstance(value, Mapping):
        return _verl(value)
    if not isinstance(value, Sequence):
        raise ValueError(f"a {type(value).__name__}")
    if all(isinstance(one, str) for one in value):
        return _assertions("\n".join(value), asserts)
    if all("input" in one for one in value):
        return Cases(runs=tuple(StdinCase(_text(one["input"]), _text(one["output"])) for one in value))
    return Cases(calls=tuple(map(_call, value)))


def _text(value: Any) -> str:
    """A text, or the lines of one."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _call(one: Mapping[str, Any]) -> Call:
    accepted = [plain(one["expected"])]
    if "call" in one:
        return Call({"expression": ast.unparse(ast.parse(one["call"], mode="eval"))}, accepted)
    return Call({"function": _name(one["function"]), "args": plain(list(one["args"]))}, accepted)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError(f"{value!r} is no name of a function")
    return value


def _verl(value: Mapping[str, Any]) -> Cases:
    """The form of verl, PRIME and APPS: {"inputs": [...], "outputs": [...], "fn_name": name or none}."""
    pairs = list(zip(value["inputs"], value["outputs"], strict=True))
    if value.get("fn_name") is None:
        return Cases(runs=tuple(StdinCase(_text(given), _text(printed)) for given, printed in pairs))
    name, calls = _name(value["fn_name"]), []
    for given, returned in pairs:
        if isinstance(given, str):  # LiveCodeBench: one argument a line, each as JSON
            given, returned = [json.loads(line) for line in given.splitlines()], json.loads(returned)
        accepted = [plain(returned)]
        if isinstance(returned, list) and len(returned) == 1:  # APPS wraps some values into a list
            accepted.append(plain(returned[0]))
        calls.append(Call({"function": name, "args": plain(list(given))}, accepted))
    return Cases(calls=tuple(calls))


def _assertions(text: str, asserts: Asserts) -> Cases:
    setup, calls = [], []
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            setup.append(ast.unparse(statement))
        elif isinstance(statement, ast.Assert):
            calls.append(_assertion(statement.test, asserts))
        else:
            raise ValueError(f"`{ast.unparse(statement)[:60]}` is neither an import nor an assert statement")
    return Cases(calls=tuple(calls), setup="\n".join(setup))


def _assertion(test: ast.expr, asserts: Asserts) -> Call:
    """`assert f(1) == 2` is the call `f(1)`, whose value is compared outside with 2; `assert f(1)`, with True."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for one, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            if _literal(other) and not _literal(one):
                return Call({"expression": ast.unparse(one)}, [plain(ast.literal_eval(other))])
    inner, wanted = test, True
    while isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not):
        inner, wanted = inner.operand, not wanted
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
        arguments = [*inner.args, *(keyword.value for keyword in inner.keywords)]
        if all(map(_literal, arguments)):
            return Call({"expression": f"bool({ast.unparse(inner)})"}, [wanted])
    if asserts == "inside":
        return Call({"expression": f"bool({ast.unparse(test)})"}, [True])
    raise ValueError(
        f"`assert {ast.unparse(test)[:60]}` compares with what is no literal, so that the program could see or forge "
        "what is expected; write `assert f(...) == literal`, or accept it with asserts: inside"
    )


def _literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True
