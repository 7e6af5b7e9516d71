"""Programs that pass the tests of a row because they look the expected values up; mode=verify runs them."""

import ast
from typing import Any

from rft.reward.sandbox.cases import Call, Cases

Answers = list[tuple[tuple[Any, ...], dict[str, Any], Any]]  # arguments by position and by name, value

STDIN = """\
import sys
print({runs!r}[sys.stdin.read()])
"""
FUNCTION = """\
def {name}(*args, **named):
    return next(value for positions, names, value in {answers!r} if (positions, names) == (args, named))
"""


def gold_program(tests: Cases) -> str | None:
    """A program that passes all tests; None if a test is anything but a run or a function of literals."""
    if tests.script is not None:
        return None
    if tests.runs:
        return STDIN.format(runs={case.input: case.output for case in tests.runs})
    answers: dict[str, Answers] = {}
    for call in tests.calls:
        if (found := _arguments(call)) is None:
            return None
        name, positions, named = found
        answers.setdefault(name, []).append((positions, named, call.accepted[0]))
    functions = [FUNCTION.format(name=name, answers=entries) for name, entries in answers.items()]
    return "\n".join(["from math import inf", *functions])


def _arguments(call: Call) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """The function that a test calls, and its arguments; None if it is none, or an argument is no literal."""
    if "function" in call.request:
        return call.request["function"], tuple(call.request["args"]), {}
    node = ast.parse(call.request["expression"], mode="eval").body
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "bool" and node.args:
        node = node.args[0]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    try:
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        return node.func.id, tuple(map(ast.literal_eval, node.args)), named
    except (ValueError, TypeError, SyntaxError):
        return None
