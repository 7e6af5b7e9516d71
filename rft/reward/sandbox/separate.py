"""Runs the tests of a row in one sandbox and the program in another, connected by two pipes.

A program can make a test end early without an error: it returns an empty list, and the loop over it asserts nothing. So
checks in tests are marked, and a test in which no check has run does not pass.
"""

import ast
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rft.reward.sandbox.cases import Script
from rft.reward.sandbox.isolation import separate
from rft.reward.sandbox.isolation.separate import MARK
from rft.reward.sandbox.sandbox import GRACE_S, Sandbox, SandboxFailed, Spawned, readable
from rft.reward.term import Unscored

SOURCE = Path(separate.__file__).read_text()
CHUNK = 65536
ANY_ERROR = {"Exception", "BaseException"}
END_S = 2.0  # until the sandbox says how the tests have ended


def count_passed(sandbox: Sandbox, program: str, script: Script) -> int | Unscored:
    """How many tests of a script a program passes; `Unscored` if the sandbox fails or the tests themselves do."""
    setup, tests, has_assert = mark_checks(script)
    testing = f"{SOURCE}\nrun_tests({setup!r}, {tests!r}, {list(script.names)!r}, {has_assert})\n"
    limits = sandbox.options.limits
    try:
        with _pipe() as calls, _pipe() as values, _pipe() as verdicts:
            nothing = os.open(os.devnull, os.O_WRONLY)
            streams = (calls.pop("reader"), values.pop("writer"), nothing)
            candidate = _spawn(sandbox, f"{SOURCE}\nanswer_calls({program!r})\n", streams)
            try:
                streams = (values.pop("reader"), calls.pop("writer"), verdicts.pop("writer"))
                tester = _spawn(sandbox, testing, streams)
                said = _read(verdicts["reader"], limits.seconds + GRACE_S, limits.output_kib * 1024)
                verdict = tester.end(END_S)
            finally:
                ended = candidate.end()
    except (SandboxFailed, ValueError) as error:
        return Unscored(f"the sandbox failed: {error}")
    for ending in (verdict, ended):
        if ending["status"] == "refused":
            return Unscored(f"the sandbox failed: {ending['reason']}")
    return _passed(said)


def _passed(said: bytes) -> int | Unscored:
    """The number of passed tests in the lines that the tests have written."""
    lines = [json.loads(line) for line in said.decode(errors="replace").splitlines() if line[:1] in '"0123456789']
    broken = [line for line in lines if isinstance(line, str)]
    return Unscored(f"the tests cannot run: {broken[0]}") if broken else len(set(lines))


def _spawn(sandbox: Sandbox, program: str, streams: tuple[int, int, int]) -> Spawned:
    """Starts a program and closes this process's copies of its streams."""
    try:
        return sandbox.spawn(program, sandbox.options.limits, streams)
    except OSError as error:
        raise SandboxFailed(str(error)) from error
    finally:
        for descriptor in streams:
            os.close(descriptor)


def _read(descriptor: int, seconds: float, most: int) -> bytes:
    """What is written to a pipe until its other end is closed."""
    said, deadline = bytearray(), time.monotonic() + seconds
    while len(said) <= most and (left := deadline - time.monotonic()) > 0:
        if readable(descriptor, left):
            part = os.read(descriptor, CHUNK)
            if not part:
                break
            said += part
    return bytes(said)


@contextmanager
def _pipe() -> Iterator[dict[str, int]]:
    """The ends of a pipe; those that are left in the mapping are closed at the end."""
    reader, writer = os.pipe()
    ends = {"reader": reader, "writer": writer}
    try:
        yield ends
    finally:
        for descriptor in ends.values():
            os.close(descriptor)


def mark_checks(script: Script) -> tuple[str, list[str], bool]:
    """The setup and the tests of a script, which call `MARK` where a check begins, and whether they have a check.

    A check is an assert statement, an `if` that raises, a call of `assert...` (numpy, unittest), a `with` block of
    `raises` or `assertRaises`, or an `except` that names the error it expects. `assert False` is none: it marks a
    line that no right program reaches.
    """
    trees = [ast.parse(text) for text in (script.setup, *script.tests)]
    has_assert = any(isinstance(node, ast.Assert) and _is_check(node) for tree in trees for node in ast.walk(tree))
    setup, *tests = [ast.unparse(ast.fix_missing_locations(_Marks().visit(tree))) for tree in trees]
    return setup, tests, has_assert


def _is_check(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assert):
        return not isinstance(statement.test, ast.Constant)
    if isinstance(statement, ast.If):
        return any(isinstance(one, ast.Raise) for one in statement.body)
    if isinstance(statement, ast.Expr):
        return _called(statement.value).startswith("assert")
    if isinstance(statement, ast.With):
        return any(_called(one.context_expr).lower().startswith(("raises", "assert")) for one in statement.items)
    return False


def _called(node: ast.expr) -> str:
    """The last part of the name of the function that an expression calls; empty if it is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func).rpartition(".")[2]


class _Marks(ast.NodeTransformer):
    """Puts a call of `MARK` in front of every check."""

    def generic_visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:  # type: ignore[override]
        super().generic_visit(node)
        return [_mark(), node] if isinstance(node, ast.stmt) and _is_check(node) else node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        super().generic_visit(node)
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if not any(kind is None or ast.unparse(kind) in ANY_ERROR for kind in kinds):
            node.body.insert(0, _mark())
        return node


def _mark() -> ast.stmt:
    return ast.parse(f"{MARK}()").body[0]
