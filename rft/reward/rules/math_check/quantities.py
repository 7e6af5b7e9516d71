r"""What answers are made of: plain numbers, units behind them, and names that stand on the left of an answer.

Numbers are integers, decimals, fractions, mixed numbers, and those in scientific notation or with repeating decimals.
Units that measure the same convert. Names are x, f(2), |CD|, \angle A, AB:CD, \frac{NO}{BO}.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from rft.reward.rules.math_check.answer import Unreadable, closing

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
# dimension: {how the unit is written: its size}
SIZES: dict[str, dict[str, str]] = {
    "length": {
        "mm millimeter": "1/1000",
        "cm centimeter": "1/100",
        "m meter": "1",
        "km kilometer": "1000",
        "in inch": "127/5000",
        "ft feet foot": "381/1250",
        "yd yard": "1143/1250",
        "mi mile": "201168/125",
    },
    "mass": {"mg milligram": "1/1000", "g gram": "1", "kg kilogram": "1000"},
    "time": {
        "s sec second": "1",
        "min minute": "60",
        "h hr hour": "3600",
        "day": "86400",
        "week": "604800",
    },
    "volume": {"ml milliliter": "1/1000", "l liter": "1"},
    "angle": {"° deg degree": "1"},
    "dollars": {"¢ cent": "1/100", "$ dollar usd buck": "1"},
    "euros": {"€ euro eur": "1"},
    "pounds": {"£ gbp": "1"},
}
UNITS = {
    name: (dimension, Fraction(size))
    for dimension, sizes in SIZES.items()
    for names, size in sizes.items()
    for name in names.split()
}
CURRENCY = "$€£"
MONEY = {"dollars", "euros", "pounds"}
SYMBOL = re.compile(r"\\?[a-zA-Z]+(?:_(?:\{[^{}]*\}|\w+))?'*(?:\((?:\\?[a-zA-Z]|-?\d)+\))?")
# The measure of what capitals name, an angle or the length of a segment, and a trigonometric function of an angle.
ANGLE = r"m?\\(?:angle|measuredangle|triangle|overline|overrightarrow)\{?[A-Z]+'*\}?"
LENGTH = r"\|(?:\\over(?:line|rightarrow)\{)?[A-Z]{2,}\}?\|"
RATIO = rf"\\(?:sin|cos|tan|cot|sec|csc)(?:{ANGLE}|\\[a-zA-Z]+|[A-Z])"
ONE = rf"(?:{ANGLE}|{LENGTH}|{RATIO}|{SYMBOL.pattern})"
NAME = re.compile(rf"{ONE}|{ONE}(?:[:/]{ONE})+|\\frac\{{{ONE}\}}\{{{ONE}\}}")
CONSTANTS = ("e", "i", r"\pi", r"\infty")
DECORATION = re.compile(r"[{}| ]|m?\\(?:angle|measuredangle|overline|overrightarrow)")


def number_of(text: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number and whether it is written with decimals; None for anything else.

    Raises:
        Unreadable: a power of ten, or a denominator, beyond the limits.
    """
    text = text.strip()
    while text.startswith("(") and closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    for pattern in (PLAIN, FRACTION, FRAC, MIXED, SCIENTIFIC, REPEATING, BASED):
        if number := pattern.fullmatch(text):
            parts = number.groupdict("")
            value = _value(parts, pattern)
            return (-value if parts["sign"] == "-" else value), "." in text and pattern is not REPEATING
    return None


def _value(parts: dict[str, str], pattern: re.Pattern[str]) -> Fraction:
    if pattern is SCIENTIFIC:
        number, exponent = parts["n"] or parts["m"], int(parts["e"] or parts["f"])
        if abs(exponent) > LARGEST_EXPONENT:
            raise Unreadable(f"it has a power of ten above {LARGEST_EXPONENT}")
        return _fraction(number) * Fraction(10) ** exponent
    if pattern is REPEATING:
        whole, once, again = (parts[name] for name in ("whole", "once", "again"))
        return Fraction(
            int(f"{whole}{once}{again}") - int(f"{whole}{once}" or "0"), (10 ** len(again) - 1) * 10 ** len(once)
        )
    if pattern is BASED:
        base = int(parts["base"])
        if not all(int(digit) < base for digit in parts["n"]):
            raise Unreadable(f"its digits are none of base {base}")
        return Fraction(int(parts["n"], base))
    if pattern is MIXED:
        return _fraction(parts["whole"]) + _ratio(parts["n"] or parts["a"], parts["d"] or parts["b"])
    return _ratio(parts["n"], parts["d"]) if "d" in parts else _fraction(parts["n"])


def _fraction(number: str) -> Fraction:
    return Fraction(number.replace(" ", "").rstrip("."))


def _ratio(number: str, divisor: str) -> Fraction:
    below = _fraction(divisor)
    if below == 0:
        raise Unreadable("it divides by zero")
    return _fraction(number) / below


@dataclass(frozen=True)
class Unit:
    """A known unit: its dimension, such as "length^2" or "length/time", and its size."""

    dimension: str
    size: Fraction


def unit(text: str) -> Unit | None:
    """The unit that a text names: "cm", "square meters", "km/h", "cm^2", "dollars per day"; None for any other."""
    parts = re.split(r"\s*/\s*|\s+per\s+", text.strip().strip("."))
    found = [_power(part) for part in parts]
    known = [part for part in found if part is not None]
    if len(known) < len(found):
        return None
    if known[0].dimension in MONEY:
        return known[0]  # "18 dollars per day" answers how many dollars
    size = known[0].size
    for part in known[1:]:
        size /= part.size
    return Unit("/".join(part.dimension for part in known), size)


def _power(text: str) -> Unit | None:
    found = re.fullmatch(r"(?:(square|sq\.?|cubic|cu\.?)\s+)?([^\W\d]+|[$€£°¢])(?:\s*\^?\{?([23²³])\}?)?", text.strip())
    if found is None:
        return None
    word, name, digit = found.groups()
    power = {"2": 2, "²": 2, "3": 3, "³": 3}.get(digit or "", {"s": 2, "c": 3}.get((word or " ")[0], 1))
    name = name.lower().replace("metre", "meter").replace("litre", "liter")
    entry = UNITS.get(name) or UNITS.get(name.removesuffix("es")) or UNITS.get(name.removesuffix("s"))
    if entry is None:
        return None
    dimension, size = entry
    return Unit(dimension if power == 1 else f"{dimension}^{power}", size**power)


def is_name(text: str) -> bool:
    """Is a text the name of a number?"""
    plain = text.replace(" ", "")
    return NAME.fullmatch(plain) is not None and plain not in CONSTANTS


def bare_name(text: str) -> str:
    r"""One writing of a name: |CD| and CD, \angle A and A are the same."""
    return DECORATION.sub("", text).casefold()
