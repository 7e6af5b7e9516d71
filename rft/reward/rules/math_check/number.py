"""Plain numbers: integers, decimals, fractions, mixed numbers, scientific notation and repeating decimals."""

import re
from fractions import Fraction

from rft.reward.rules.math_check.clean import Unreadable, closing

LARGEST_EXPONENT = 1000  # of scientific notation

_N = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SIGN = r"(?P<sign>[-+]?)\s*"
PLAIN = re.compile(rf"{_SIGN}(?P<n>{_N})")
FRACTION = re.compile(rf"{_SIGN}(?P<n>{_N})\s*/\s*(?P<d>-?{_N})")
FRAC = re.compile(rf"{_SIGN}\\frac\{{\s*(?P<n>-?\s*{_N})\s*\}}\{{\s*(?P<d>-?{_N})\s*\}}")
BASED = re.compile(rf"{_SIGN}(?P<n>\d+)_\{{?(?P<base>\d{{1,2}})\}}?")
MIXED = re.compile(
    rf"{_SIGN}(?P<whole>\d+)\s*(?:\\frac\{{\s*(?P<n>\d+)\s*\}}\{{\s*(?P<d>\d+)\s*\}}|\s(?P<a>\d+)/(?P<b>\d+))"
)
SCIENTIFIC = re.compile(
    rf"{_SIGN}(?:(?P<n>{_N})\s*(?:\\cdot|x)\s*10\^\{{(?P<e>[-+]?\d+)\}}|(?P<m>{_N})[eE](?P<f>[-+]?\d+))"
)
REPEATING = re.compile(rf"{_SIGN}(?P<whole>\d*)\.(?P<once>\d*)\\(?:overline|bar|dot)\{{?(?P<again>\d+)\}}?")


def number_of(text: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number and whether it is written with decimals; None for anything else.

    Raises:
        Unreadable: a power of ten, or a denominator, beyond the limits.
    """
    text = text.strip()
    while text.startswith("(") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    for pattern in (PLAIN, FRACTION, FRAC, MIXED, SCIENTIFIC, REPEATING, BASED):
        if found := pattern.fullmatch(text):
            parts = found.groupdict()
            value = _value(parts, pattern)
            return (-value if parts["sign"] == "-" else value), "." in text and pattern is not REPEATING
    return None


def _value(parts: dict[str, str | None], pattern: re.Pattern[str]) -> Fraction:
    if pattern is SCIENTIFIC:
        number, exponent = parts["n"] or parts["m"], int(parts["e"] or parts["f"] or "0")
        if abs(exponent) > LARGEST_EXPONENT:
            raise Unreadable(f"it has a power of ten above {LARGEST_EXPONENT}")
        return _fraction(number) * Fraction(10) ** exponent
    if pattern is REPEATING:
        whole, once, again = (parts[name] or "" for name in ("whole", "once", "again"))
        return Fraction(
            int(f"{whole}{once}{again}") - int(f"{whole}{once}" or "0"), (10 ** len(again) - 1) * 10 ** len(once)
        )
    if pattern is BASED:
        base = int(parts["base"] or "")
        if not all(int(digit) < base for digit in parts["n"] or ""):
            raise Unreadable(f"its digits are none of base {base}")
        return Fraction(int(parts["n"] or "", base))
    if pattern is MIXED:
        return _fraction(parts["whole"]) + _ratio(parts["n"] or parts["a"], parts["d"] or parts["b"])
    return _ratio(parts["n"], parts["d"]) if "d" in parts else _fraction(parts["n"])


def _fraction(number: str | None) -> Fraction:
    assert number is not None
    return Fraction(number.replace(" ", "").rstrip("."))


def _ratio(number: str | None, divisor: str | None) -> Fraction:
    below = _fraction(divisor)
    if below == 0:
        raise Unreadable("it divides by zero")
    return _fraction(number) / below
