r"""What an answer says: a number, a formula, words, a relation, or several of them in a list, tuple, set or matrix.

This module reads the structure, in which signs such as "," and "(" have several meanings. The formulas in it are read
by math-verify, see `equal`.
"""

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rft.reward.rules.math_check.answer import MATH, NUMBER
from rft.reward.rules.math_check.units import CURRENCY, Unit, unit

UNION = "\u222a"
ROW = "\u21b5"  # the end of a row of a matrix
LONGEST = 1000  # characters of an answer; a longer one is not read
LARGEST_EXPONENT = 1000  # of scientific notation
ADVERBS = re.compile(r"(?i)^(?:about|approximately|exactly|around|roughly|only|just|a total of|is|≈)\s*")
FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "lim", "max", "min", "gcd", "lcm", "det"}

_SIGNS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2011": "-", "\u00d7": r"\cdot ", "\u00b7": r"\cdot ",
        "\u22c5": r"\cdot ", "\u00f7": "/", "\u2215": "/", "π": r"\pi ", "∞": r"\infty ", "θ": r"\theta ",
        "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "\uff0c": ",", "\uff08": "(", "\uff09": ")", "\u00ba": "°",
        "\uff05": "%",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "√": r"\sqrt", "\u2019": "'", "⟨": "(", "⟩": ")", "`": " ",
    }
)  # fmt: skip
# Sets stand in braces of their own, so that those of LaTeX only group.
_COMMANDS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\\\\(?=[a-zA-Z])(?![\s\S]*\\end)", r"\\"),  # a command that was escaped twice
    (r"\\\\(?:\[[^\]]*\])?", ROW),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|phantom\{[^{}]*\})(?![a-zA-Z])\.?", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"(\d)(?:\{,\}|\\[,!;: ]|,\\!)(?=\d{3})", r"\1"),  # 1{,}000 and 1\,000
    (r"\\[,;:! ]|~|\\q?quad(?![a-zA-Z])|\\hspace\{[^{}]*\}", " "),
    (r"\\(?:textbf|textit|textrm|textsf|mbox|mathrm|rm|hbox|textnormal)\s*(?=\{)", r"\\text"),
    (r"\\(?:mathbf|mathit|boldsymbol|bm|emph|vec)\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:\{|lbrace(?![a-zA-Z]))", "⦃"),
    (r"\\(?:\}|rbrace(?![a-zA-Z]))", "⦄"),
    (r"\\(?:langle|rangle)(?![a-zA-Z])", lambda found: "(" if found.group() == r"\langle" else ")"),
    (r"\\\$", "$"),
    (r"\\?%|\s*\\text\s*\{\s*percent\s*\}|\s+percent\b", "%"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", "°"),
    (r"\\leqslant|\\leq|\\le(?![a-zA-Z])|<=|=<", "≤"),
    (r"\\geqslant|\\geq|\\ge(?![a-zA-Z])|>=", "≥"),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\approx|\\simeq|\\equiv|≈|==", "="),
    (r"\\neq|\\ne(?![a-zA-Z])|!=", "≠"),
    (r"\\in(?![a-zA-Z])", "∈"),
    (r"\\cup(?![a-zA-Z])|(?<=[\])])\s*U\s*(?=[\[(])", UNION),
    (r"\\(?:pm|mp)(?![a-zA-Z])|\+/-|\+-", "±"),
    (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|∅", "⦃⦄"),
    (r"(?<![\\a-zA-Z])(?i:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
    (r"(?<![\\a-zA-Z])(?i:pi)(?![a-zA-Z])", r"\\pi "),
    (r"(?<![\\a-zA-Z])sqrt(?![a-zA-Z])", r"\\sqrt"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*(\d+)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*([a-zA-Z])", r"\\sqrt{\1}"),
    (r"\*\*", "^"),
    (r"\\(?:times|ast|cdot)(?![a-zA-Z])|\*", r"\\cdot "),
    (r"\\div(?![a-zA-Z])", "/"),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"\^\s*(-?\d+)", r"^{\1}"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
    (r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
    (r"(?<=\d)[ \t]*\\cdots|\\l?dots(?![a-zA-Z])|\.\.\.|…", "…"),
    (r"\s+", " "),
]  # fmt: skip
COMMANDS = [(re.compile(pattern), to) for pattern, to in _COMMANDS]

_N = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SIGN = r"(?P<sign>[-+]?)\s*"
PLAIN = re.compile(rf"{_SIGN}(?P<n>{_N})")
FRACTION = re.compile(rf"{_SIGN}(?P<n>{_N})\s*/\s*(?P<d>-?{_N})")
FRAC = re.compile(rf"{_SIGN}\\frac\{{\s*(?P<n>-?\s*{_N})\s*\}}\{{\s*(?P<d>-?{_N})\s*\}}")
MIXED = re.compile(
    rf"{_SIGN}(?P<whole>\d+)\s*(?:\\frac\{{\s*(?P<n>\d+)\s*\}}\{{\s*(?P<d>\d+)\s*\}}|\s(?P<a>\d+)/(?P<b>\d+))"
)
SCIENTIFIC = re.compile(
    rf"{_SIGN}(?:(?P<n>{_N})\s*(?:\\cdot|x)\s*10\^\{{(?P<e>[-+]?\d+)\}}|(?P<m>{_N})[eE](?P<f>[-+]?\d+))"
)
REPEATING = re.compile(rf"{_SIGN}(?P<whole>\d*)\.(?P<once>\d*)\\(?:overline|bar|dot)\{{?(?P<again>\d+)\}}?")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]*\d)")
SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d ]*\d)")
MATRIX = re.compile(
    r"[\[(]?\s*\\begin\{(?:[bp]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{(?:[bp]?matrix|array)\}\s*[\])]?"
)
RELATIONS = "=<>≤≥≠"
OPEN, CLOSE = "([{⦃", ")]}⦄"
UNIT_TEXT = re.compile(r"^(?P<of>.*\S)\s*\\text\s*\{(?P<unit>[^{}\\]*)\}(?P<power>\s*(?:\^\{?[23]\}?)?(?:\s*/.*)?)$")
UNIT_WORDS = re.compile(
    r"^(?P<of>.*?[\d})%a-z])(?P<gap>\s*)(?P<unit>(?:°\s*)?(?<![\\a-zA-Z])(?:[a-zA-Z][a-zA-Z'\-]*)"
    r"(?:\^\{[23]\})?(?:(?:\s*/\s*|\s+)[a-zA-Z][a-zA-Z'\-]*(?:\^\{[23]\})?)*)$"
)
SYMBOL = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?'*(?:\((?:\\?[a-zA-Z]|\d)+\))?")


class Unreadable(ValueError):
    """A text is no answer: nothing, unbalanced brackets, or beyond the limits of this module."""


@dataclass(frozen=True)
class Scalar:
    """A number or a formula.

    Attributes:
        latex: without its unit.
        value: of a plain number, None for a formula.
        decimal: the number is written with decimals, so that it may be rounded.
        percent: a percent sign stands behind it; `value` does not contain the hundredth.
        unit: behind it, None where it is unknown or there is none.
    """

    latex: str
    value: Fraction | None = None
    decimal: bool = False
    percent: bool = False
    unit: Unit | None = None


@dataclass(frozen=True)
class Words:
    """An answer in words.

    Attributes:
        text: in lower case, without marks around it.
        latex: the formula that it may be too ("abc"), None where it can be none.
    """

    text: str
    latex: str | None = None


@dataclass(frozen=True)
class Group:
    """Several answers.

    Attributes:
        kind: list (without brackets), tuple (in brackets, or an interval), set, union, or matrix (of tuples).
        items: the answers.
        ends: the brackets of a tuple, such as "(]".
    """

    kind: str
    items: tuple["Answer", ...]
    ends: str = ""


@dataclass(frozen=True)
class Relation:
    """Sides with signs between them: "x = 5", "1 < x <= 2"."""

    signs: str
    sides: tuple["Answer", ...]


Answer = Scalar | Words | Group | Relation


@lru_cache(maxsize=4096)
def readings(text: str) -> tuple[Answer, ...]:
    """The answers that a text may be, the likeliest first: "1,234" is a number, or a list of two.

    Raises:
        Unreadable: it is none.
    """
    if len(text) > LONGEST:
        raise Unreadable(f"it has more than {LONGEST} characters")
    cleaned = clean(text)
    found = [_read(_joined(cleaned))]
    if THOUSANDS.fullmatch(cleaned):
        found.append(_read(cleaned))
    if isinstance(found[0], Words) and len(numbers := NUMBER.findall(text)) == 1:
        found.append(_read(_joined(clean(numbers[0]))))  # "Janet makes 18 dollars a day"
    return tuple(found)


def clean(text: str) -> str:
    """One way of writing for what LaTeX and Unicode write in many, without the marks around formulas and emphasis."""
    text = MATH.sub(lambda found: " " + next(group for group in found.groups() if group is not None) + " ", text)
    text = re.sub(r"\\[()\[\]](?!\d*(?:pt|em))", " ", text.strip()) if r"\begin" not in text else text
    text = text.replace("**", "") if re.search(r"^\*\*|\*\*$", text.strip()) else text
    text = text.translate(_SIGNS)
    for pattern, to in COMMANDS:
        text = pattern.sub(to, text)
    return _bare(text)


def _bare(text: str) -> str:
    """Without blanks and marks of a sentence around it, and without braces around all of it."""
    while True:
        before = text
        text = re.sub(r"^[\s:;,.!?_]+(?!\d)|^[\s:;,]+|[\s:;,.?_]+$", "", ADVERBS.sub("", text))
        if text.startswith("{") and _closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            return text


def _joined(text: str) -> str:
    """Numbers without the signs between thousands, outside of brackets."""
    parts = _pieces(text)
    return "".join(
        SPACED.sub(lambda found: found.group().replace(" ", ""), THOUSANDS.sub(_without_commas, part)) if flat else part
        for part, flat in parts
    )


def _without_commas(found: re.Match[str]) -> str:
    return found.group().replace(",", "")


def _pieces(text: str) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it stands outside of round, square and set brackets."""
    pieces, depth, start = [], 0, 0
    for place, sign in enumerate(text):
        if sign in "([⦃":
            if depth == 0:
                pieces.append((text[start:place], True))
                start = place
            depth += 1
        elif sign in ")]⦄":
            depth -= 1
            if depth == 0:
                pieces.append((text[start : place + 1], False))
                start = place + 1
    return [*pieces, (text[start:], depth == 0)]


def _closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`; -1 without one."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in OPEN) - (text[place] in CLOSE)
        if depth == 0:
            return place
    return -1


def split(text: str, pattern: str) -> tuple[list[str], list[str]]:
    """The parts of a text between the places outside of brackets where a pattern fits, and those places."""
    parts, found, depth, start = [], [], 0, 0
    matches = {match.start(): match for match in re.finditer(pattern, text)}
    for place, sign in enumerate(text):
        depth += (sign in OPEN) - (sign in CLOSE)
        if depth < 0:
            raise Unreadable("its brackets are not balanced")
        if depth == 0 and place >= start and place in matches:
            parts.append(text[start:place])
            found.append(matches[place].group())
            start = matches[place].end()
    if depth:
        raise Unreadable("its brackets are not balanced")
    return [*parts, text[start:]], found


def _read(text: str) -> Answer:
    text = _bare(text)
    if whole := re.fullmatch(r"\\text\s*\{([^{}]*)\}", text):
        text = _bare(whole[1])
    if not text:
        raise Unreadable("it is empty")
    if matrix := MATRIX.fullmatch(text):
        rows = [row for row in matrix[1].split(ROW) if row.strip()]
        cells = (tuple(_read(_joined(cell)) for cell in row.split("&")) for row in rows)
        return Group("matrix", tuple(Group("tuple", row, "()") for row in cells))
    items, found = split(text, r",|;|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<=[\s\d})])(?:and|or)(?=[\s\\$])")
    items = [item for item in items if item.strip()] if found else items
    if len(items) > 1:
        return Group("list", tuple(_flat(map(_read, items))))
    text = _bare(items[0]) if items else ""
    member, found = split(text, "∈")
    if len(member) == 2 and SYMBOL.fullmatch(member[0].strip()):
        return _read(member[1])
    sides, signs = split(text, f"[{RELATIONS}]")
    if signs:
        return Relation("".join(signs), tuple(map(_read, sides)))
    parts, signs = split(text, UNION)
    if signs:
        return Group("union", tuple(map(_read, parts)))
    return _group(text) or _signed(text)


def _flat(items: Iterable[Answer]) -> list[Answer]:
    nested = [item.items if isinstance(item, Group) and item.kind == "list" else (item,) for item in items]
    return list(itertools.chain.from_iterable(nested))


def _group(text: str) -> Answer | None:
    """The group that the brackets around a text make; None where no brackets are around all of it."""
    if not text or text[0] not in "([⦃" or _closing(text, 0) != len(text) - 1 or text[-1] == "}":
        return None
    inside = text[1:-1]
    if text[0] == "⦃":
        if re.search(r"\\mid|[|:]", inside):
            raise Unreadable("it describes a set by a condition")
        items = split(inside, "[,;]")[0] if inside.strip() else []
        return Group("set", tuple(_flat(map(_read, items))))
    items, found = split(inside, "[,;]")
    if not found:
        return _read(inside) if text[0] + text[-1] in ("()", "[]") else None
    return Group("tuple", tuple(map(_read, items)), text[0] + text[-1])


def _signed(text: str) -> Answer:
    """A scalar, or the list of those that a plus-minus sign makes of it."""
    count = text.count("±")
    if not 1 <= count <= 2:
        return _scalar(text)
    parts = text.split("±")
    every = []
    for signs in itertools.product("+-", repeat=count):
        joined = parts[0] + "".join(sign + part for sign, part in zip(signs, parts[1:], strict=True))
        every.append(_scalar(joined.strip().lstrip("+")))
    return Group("list", tuple(every))


def _scalar(text: str) -> Answer:
    text = _bare(text)
    of, found = _without_unit(text)
    of, percent = (of.rstrip()[:-1].rstrip(), True) if of.rstrip().endswith("%") else (of, False)
    if (value := number_of(of)) is not None:
        return Scalar(of, *value, percent=percent, unit=found)
    if re.fullmatch(r"[a-zA-Z0-9 '\-.&()]*", text) and (run := re.search(r"[a-zA-Z]{2,}", text)):
        formula = text if len(run.group()) <= 3 and text == run.group() else None
        if not FUNCTIONS.intersection(re.findall(r"[a-zA-Z]+", text)):
            return Words(_words(text), formula)
    if not of.strip():
        raise Unreadable("it has a unit and no number")
    return Scalar(_formula(of), None, bool(re.search(r"\d\.\d", of)), percent, found)


def _words(text: str) -> str:
    return " ".join(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).casefold().split()).strip(" .,()'\"")


def _formula(text: str) -> str:
    """The formula for math-verify: 1/2x is (1/2)x, and 30° inside is π/6."""
    text = re.sub(r"(?<![\d.\w}\)^])(\d+)\s*/\s*(\d+)(?![\d.!^])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(\d+(?:\.\d+)?)\s*°", r"{(\\frac{\1\\pi}{180})}", text)
    return text.replace("⦃", r"\{").replace("⦄", r"\}").strip()


def _without_unit(text: str) -> tuple[str, Unit | None]:
    """The text without a currency sign and a unit, and the unit where it is known."""
    money = re.match(rf"(-?)\s*([{CURRENCY}])\s*(.*)$", text)
    found = None
    if money:
        text, found = money[1] + money[3], unit(money[2])
    if text.endswith("°") and len(text) > 1 and "°" not in text[:-1]:
        return text[:-1], unit("°")
    if (match := UNIT_TEXT.match(text)) and re.search(r"[\w})%]$", match["of"]):
        return match["of"], unit(match["unit"].strip() + match["power"].replace("text", "")) or found
    if (match := UNIT_WORDS.match(text)) and not match["of"].endswith("\\"):
        words = re.findall(r"[a-zA-Z]+", match["unit"])
        known = unit(match["unit"])
        long = (len(words[0]) > 1 or (known and "/" in known.dimension)) and not FUNCTIONS.intersection(words)
        if long and (known or (match["gap"] and len(words[0]) > 2) or (match["gap"] and len(words) > 1)):
            return match["of"], known or found
    return text, found


def number_of(text: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number and whether it is written with decimals; None for anything else.

    Raises:
        Unreadable: a power of ten, or a denominator, beyond the limits.
    """
    text = text.strip()
    while text.startswith("(") and _closing(text, 0) == len(text) - 1:
        text = text[1:-1].strip()
    for pattern in (PLAIN, FRACTION, FRAC, MIXED, SCIENTIFIC, REPEATING):
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
