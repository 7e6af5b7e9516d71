"""Names that stand on the left of an answer: x, f(2), |CD|, \angle A, AB:CD, \frac{NO}{BO}, (a, b)."""

import re

from rft.reward.rules.math_check.parse import SYMBOL, Answer, Group, Relation, Scalar, Words

# The measure of what capitals name: an angle, the length of a segment.
MEASURE = (
    r"m?\\(?:angle|measuredangle|triangle|overline|overrightarrow)\{?[A-Z]+'*\}?|\|(?:\\overline\{)?[A-Z]{2,}\}?\|"
)
ONE = rf"(?:{MEASURE}|{SYMBOL.pattern})"
NAME = re.compile(rf"{ONE}|{ONE}(?:[:/]{ONE})+|\\frac\{{{ONE}\}}\{{{ONE}\}}")
DECORATION = re.compile(r"[{}|]|\\(?:angle|measuredangle|overline|overrightarrow)")


def is_name(side: Answer) -> bool:
    """Is the side of a relation a name, or names in round brackets?"""
    if isinstance(side, Words):
        return True
    if isinstance(side, Group):
        return side.ends == "()" and all(map(is_name, side.items))
    if not isinstance(side, Scalar) or side.value is not None:
        return False
    plain = side.latex.replace(" ", "")
    return NAME.fullmatch(plain) is not None and plain not in ("e", "i", r"\pi", r"\infty")


def name_of(side: Answer) -> str:
    """The first name among the sides of a relation, or a name itself, in one writing; "" where there is none."""
    if isinstance(side, Relation):
        return next((name_of(part) for part in side.sides if is_name(part)), "")
    if isinstance(side, Group):
        return ",".join(map(name_of, side.items))
    text = side.latex if isinstance(side, Scalar) else side.text
    return DECORATION.sub("", text.replace(" ", "")).casefold()
