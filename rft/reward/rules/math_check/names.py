"""Names that stand on the left of an answer: x, f(2), |CD|, \angle A, AB:CD, \frac{NO}{BO}."""

import re

SYMBOL = re.compile(r"\\?[a-zA-Z]+(?:_(?:\{[^{}]*\}|\w+))?'*(?:\((?:\\?[a-zA-Z]|-?\d)+\))?")
# The measure of what capitals name, an angle or the length of a segment, and a trigonometric function of an angle.
ANGLE = r"m?\\(?:angle|measuredangle|triangle|overline|overrightarrow)\{?[A-Z]+'*\}?"
LENGTH = r"\|(?:\\over(?:line|rightarrow)\{)?[A-Z]{2,}\}?\|"
RATIO = rf"\\(?:sin|cos|tan|cot|sec|csc)(?:{ANGLE}|\\[a-zA-Z]+|[A-Z])"
ONE = rf"(?:{ANGLE}|{LENGTH}|{RATIO}|{SYMBOL.pattern})"
NAME = re.compile(rf"{ONE}|{ONE}(?:[:/]{ONE})+|\\frac\{{{ONE}\}}\{{{ONE}\}}")
CONSTANTS = ("e", "i", r"\pi", r"\infty")
DECORATION = re.compile(r"[{}| ]|m?\\(?:angle|measuredangle|overline|overrightarrow)")


def is_name(text: str) -> bool:
    """Is a text the name of a number?"""
    plain = text.replace(" ", "")
    return NAME.fullmatch(plain) is not None and plain not in CONSTANTS


def bare_name(text: str) -> str:
    r"""One writing of a name: |CD| and CD, \angle A and A are the same."""
    return DECORATION.sub("", text).casefold()
