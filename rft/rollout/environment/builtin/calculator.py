"""A calculator as a tool."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 200  # characters of an expression
DIGITS = 100  # of a result

BINARY: dict[type[ast.operator], Callable[[Any, Any], int | float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], int | float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator:
    """An environment with a calculator. Its episodes have no state."""

    def reset(self, **row: Any) -> None:
        """Adds nothing to the prompt."""

    def calculate(self, expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: numbers with + - * / // % and parentheses.
        """
        if len(expression) > LONGEST:
            raise ValueError(f"an expression has at most {LONGEST} characters")
        try:
            tree = ast.parse(expression.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{expression!r} is no arithmetic expression") from error
        value = _value(tree.body)
        if not math.isfinite(value):
            raise ValueError("the result is not finite")
        text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
        if len(text) > DIGITS:
            raise ValueError(f"the result has more than {DIGITS} digits")
        return text


def _value(node: ast.AST) -> int | float:
    """The value of an expression.

    Raises:
        ValueError: it has something else than numbers and arithmetic operators, or divides by zero.
    """
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    try:
        if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
            return BINARY[type(node.op)](_value(node.left), _value(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
            return UNARY[type(node.op)](_value(node.operand))
    except (ZeroDivisionError, OverflowError) as error:
        raise ValueError(str(error)) from error
    raise ValueError("only numbers, + - * / // % and parentheses can be computed")
