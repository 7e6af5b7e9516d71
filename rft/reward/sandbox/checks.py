"""Marks the checks in tests that are Python, so that a test in which no check has run does not pass.

A program can make a test end early without an error: it returns an empty list, and the loop over it asserts nothing.
"""

import ast

from rft.reward.sandbox.cases import Script
from rft.reward.sandbox.isolation.separate import MARK

ANY_ERROR = {"Exception", "BaseException"}


def mark_checks(script: Script) -> tuple[str, list[str], bool]:
    """The setup and the tests of a script, which call `MARK` where a check begins, and whether they have a check.

    A check is an assert statement, an `if` that raises, a call of `assert...` (numpy, unittest), a `with` block of
    `raises` or `assertRaises`, or an `except` that names the error it expects. `assert False` is none: it marks a
    line that no right program reaches.
    """
    trees = [ast.parse(text) for text in (script.setup, *script.tests)]
    has_assert = any(isinstance(one, ast.Assert) and _is_check(one) for tree in trees for one in ast.walk(tree))
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
        if not any(one is None or ast.unparse(one) in ANY_ERROR for one in kinds):
            node.body.insert(0, _mark())
        return node


def _mark() -> ast.stmt:
    return ast.parse(f"{MARK}()").body[0]
