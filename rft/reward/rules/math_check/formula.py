"""Formulas: the parser of math-verify reads them, sympy evaluates them, math-verify compares what has no value."""

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rft.reward.rules.math_check.answer import Unreadable

DIGITS = 50  # to which formulas without variables are evaluated
LARGEST = 10_000  # digits of a number in a formula
LARGEST_ARGUMENT = 7  # digits of what a function such as cosh is applied to
LARGEST_COUNT = 5  # digits of the number of terms of a sum or product
LARGEST_POWER = 100  # of a sum with variables
PRIME = re.compile(r"\^\s*(?:\{\s*((?:\\prime\s*)+)\}|(\\prime))")
PRIMED = re.compile(r"(\\[a-zA-Z]+|[a-zA-Z])(?:_(?:\{(\w+)\}|(\w)))?('+)")


class Failed(Exception):
    """The comparison of two readable formulas failed."""


def installed() -> bool:
    """Is math-verify installed, with the parser of a version of antlr4 that it knows?"""
    try:
        import math_verify  # noqa: F401
    except ImportError:
        return False
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts, which need signals, are off
    return True


def _named(latex: str) -> str:
    """x' and f'(x) with the names x_{primed} and f_{primed}, since the parser drops the sign."""
    latex = PRIME.sub(lambda found: "'" * found.group().count(r"\prime"), latex)
    return PRIMED.sub(lambda found: f"{found[1]}_{{{found[2] or found[3] or ''}{'primed' * len(found[4])}}}", latex)


@lru_cache(maxsize=4096)
def formula(latex: str) -> Any:
    """The sympy expression of a formula.

    Raises:
        Unreadable: it is no formula, or beyond the limits.
    """
    from latex2sympy2_extended import latex2sympy
    from sympy import Basic, Integral, MatrixBase, nan, zoo

    try:
        expression = latex2sympy(
            _named(latex) if "'" in latex or r"\prime" in latex else latex, is_real=True, normalization_config=None
        )
    except Exception as error:  # the parser raises plain Exceptions
        raise Unreadable("math-verify cannot parse it") from error
    if not isinstance(expression, Basic) or isinstance(expression, MatrixBase):
        raise Unreadable("it is no formula")
    if expression.has(nan, zoo):
        raise Unreadable("it divides by zero")
    if expression.has(Integral):  # sympy's numeric integrals can be wrong: it gives -4 for that of sin(x)/x from 0
        raise Unreadable("an integral is not solved")
    if _digits(expression) > LARGEST:
        raise Unreadable(f"a number in it has more than {LARGEST} digits")
    try:
        exact = _exact_formula(expression)
        numeric(exact)
    except Exception as error:  # (-1)!, a series that diverges; sympy may raise anything
        raise Unreadable("it has no value") from error
    return exact


def _exact_formula(expression: Any) -> Any:
    """The formula with fractions in place of decimals, and the imaginary unit in place of an i that counts nothing."""
    from sympy import Derivative, Float, I, Product, Rational, Sum, Symbol

    expression = expression.doit() if expression.has(Derivative) else expression
    exact = {number: Rational(str(number)) for number in expression.atoms(Float)}
    if not expression.has(Sum, Product):
        exact |= {symbol: I for symbol in expression.atoms(Symbol) if symbol.name == "i"}
    return expression.xreplace(exact) if exact else expression


def _digits(expression: Any) -> float:
    """An upper bound of the digits of the numbers that an unevaluated expression leads to; infinity for more."""
    from sympy import Abs, Function, Pow, Product, Sum, ceiling, exp, factorial, floor, log, oo

    if not expression.args:
        return math.log10(abs(int(expression)) + 1) if expression.is_Integer else 1.0
    sizes = [_digits(part) for part in expression.args]
    if any(size > LARGEST for size in sizes):
        return math.inf
    if isinstance(expression, Pow) and expression.exp.is_number:
        if expression.base.is_Integer and expression.exp.is_Integer and expression.exp < 0:
            sizes[0] = 0.0 if expression.exp == -1 else sizes[0]  # 1/180 makes a number smaller
        power = _magnitude(expression.exp)
        if expression.base.free_symbols and not expression.base.is_Symbol and power > LARGEST_POWER:
            return math.inf
        return sizes[0] * max(1.0, power)
    if isinstance(expression, exp) and expression.args[0].is_number:
        return _magnitude(expression.args[0])
    if isinstance(expression, factorial) and expression.args[0].is_number:
        number = _magnitude(expression.args[0])
        return number * math.log10(number + 1)
    if isinstance(expression, Function) and not isinstance(expression, Abs | log | floor | ceiling):
        return math.inf if max(sizes) > LARGEST_ARGUMENT else sum(sizes)
    if isinstance(expression, Sum | Product):
        if isinstance(expression, Product) and expression.has(oo):
            return math.inf
        return math.inf if max(sizes[1:]) > LARGEST_COUNT else sum(sizes)
    return sum(sizes)


def _magnitude(number: Any) -> float:
    """The absolute value of an expression without variables; infinity where it has none that a float can hold.

    Raises:
        Unreadable: sympy cannot evaluate it.
    """
    try:
        value = abs(number.evalf(15))
    except Exception as error:  # sympy may raise anything
        raise Unreadable("it has no value") from error
    return float(value) if value.is_Float or value.is_Rational else math.inf


def value_at(expression: Any, values: dict[Any, Any]) -> Any:
    """`numeric` of an expression with values for its variables; the variable that a sum counts with stays."""
    known = {name: values[name] for name in expression.free_symbols}
    return numeric(expression.subs(known) if known else expression)


def answer_at(expression: Any, values: dict[Any, Any]) -> Any:
    """As `value_at` for the answer of a response.

    Raises:
        Unreadable: sympy cannot evaluate it.
    """
    try:
        return value_at(expression, values)
    except Exception as error:  # sympy may raise anything
        raise Unreadable("it has no value") from error


@lru_cache(maxsize=4096)
def numeric(expression: Any) -> Any:
    """The value of an expression to `DIGITS` digits, None where it has variables or no finite value."""
    if not expression.is_Atom and expression.free_symbols:
        return None
    value = expression.evalf(DIGITS)
    parts = value.as_real_imag() if value.is_number else (value,)
    return value if all(part.is_Float or part.is_Rational for part in parts) else None


def as_fraction(number: Any) -> Fraction:
    """The number to 25 digits."""
    import sympy

    ratio = sympy.Rational(str(sympy.N(number, 25)))
    return Fraction(int(ratio.p), int(ratio.q))


def exact_text(latex: str, factor: Fraction) -> str:
    """One text for equal formulas as far as expanding them shows it: 2*sqrt(3) and sqrt(12) have one.

    Raises:
        Unreadable: it is no formula.
    """
    import sympy

    read = formula(latex)
    try:
        expression = read * sympy.Rational(factor.numerator, factor.denominator)
        value = numeric(expression)
        if value is None:
            return str(sympy.expand(expression.doit()))
        rational = sympy.nsimplify(value, rational=True, tolerance=sympy.Float(10) ** -30)
        return str(rational) if rational.q < 10**6 else str(sympy.N(value, 15))
    except Exception:  # noqa: BLE001 - as in `comparing`: sympy may raise anything; the text as it is written is one too
        return latex.replace(" ", "")


@contextmanager
def comparing() -> Iterator[None]:
    """Compares in the block.

    Raises:
        Failed: it raised an error.
    """
    try:
        yield
    except (Unreadable, Failed):
        raise
    except Exception as error:  # sympy may raise anything on a formula
        raise Failed(type(error).__name__) from error


def verified(gold: Any, answer: Any) -> bool:
    """math-verify's comparison of two expressions. Its timeouts are off: they need signals, so the main thread."""
    from math_verify import verify

    return bool(verify(gold, answer, timeout_seconds=None, raise_on_error=True))
