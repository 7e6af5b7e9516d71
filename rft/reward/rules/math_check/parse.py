r"""What an answer means: a number, a formula, words, a relation, or several of them in a list, tuple, set or matrix.

This module reads the structure, in which signs such as "," and "(" have several meanings. The formulas in it are read
by math-verify, see `equal`.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from rft.reward.rules.math_check.answer import CLOSE, NUMBER, OPEN, ROW, UNION, Unreadable, bare, clean, closing
from rft.reward.rules.math_check.quantities import CURRENCY, SYMBOL, Unit, is_name, number_of, unit

LONGEST = 1000  # characters of an answer; a longer one is not read
FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "lim", "max", "min", "gcd", "lcm", "det"}
# No products of their letters.
SHORT_WORDS = {"all", "and", "any", "no", "not", "odd", "off", "on", "one", "or", "six", "ten", "two", "yes"}
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,]*\d)")
SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d ]*\d)")
MATRIX = re.compile(
    r"[\[(]?\s*\\begin\{(?:[bp]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{(?:[bp]?matrix|array)\}\s*[\])]?"
)
LIMITING = re.compile(
    r"(?i)\b(?:not|no|never|neither|wrong|except|than|least|most|more|less|over|under|dozen|half|hundred|maybe|twice)\b|n't"
)
NO_UNIT = re.compile(
    r"(?i)\d|\b(?:not|no|never|than|except|least|most|dozen|half|hundred|or|and|maybe|times|twice)\b|n't"
)
RATIO = re.compile(r"\s*(\d+(?:\.\d+)?)\s*:\s*(\d+(?:\.\d+)?)\s*")
CLOCK = re.compile(r"(?i)(?P<hour>\d{1,2})\s*:\s*(?P<minutes>[0-5]\d)(?:\s*(?P<half>[ap])\.?\s?m\.?)?")
DURATION = re.compile(r"\d{1,2}(?::[0-5]\d){2}")
METRES = re.compile(r"(?<=\d)(?:\s+|(?<=\.\d)|(?<=\.\d\d))m(?P<power>[²³])")
# What may be units behind nothing but a number, or variables: 5m³ and 5 m.
TIGHT_METRES = re.compile(r"^(?P<before>(?:[^=]*=)?[^a-zA-Z\\=]*\d)m(?P<power>[²³])")
LETTER = re.compile(r"((?:[^=]*=)?[^a-zA-Z\\=]*\d)\s+([gmsh])")
SEPARATOR = re.compile(
    r"(?=[,;\\ao])(?:,|;|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<=[\s\d})⦄\]])(?:and|or)(?=[\s\\$\d({⦃\[-])"
    r"|(?<=[\d})⦄\]])(?:and|or)(?=[a-zA-Z](?:_\w)?(?:\([a-zA-Z\d]\))?\s*=))"
)
CHOICE = re.compile(r"(?:\(([A-J])\)|([A-J])[.):])\s+(?!and\b|or\b)\S")
CASES = re.compile(r"\\begin\{cases\}(.*)\\end\{cases\}")
BRACKET = re.compile(f"[{re.escape(OPEN + CLOSE)}]")
RELATIONS = "=<>≤≥≠"
UNIT_TEXT = re.compile(r"^(?P<of>.*\S)\s*\\text\s*\{(?P<unit>[^{}\\]*)\}(?P<power>\s*(?:\^\{?[23]\}?)?(?:\s*/.*)?)$")
UNIT_WORDS = re.compile(
    r"^(?P<of>.*?[\d})%a-z])(?P<gap>\s*)(?P<unit>(?:°\s*)?(?<![\\a-zA-Z])(?:[a-zA-Z][a-zA-Z'\-]*)"
    r"(?:\^\{[23]\})?(?:(?:\s*/\s*|\s+)[a-zA-Z][a-zA-Z'\-]*(?:\^\{[23]\})?)*)$"
)


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
        kind: list (without brackets), tuple (in brackets, or an interval), set, union, matrix (of tuples), or ratio (of
            three or more).
        items: the answers.
        ends: the brackets of a tuple, such as "(]"; "or" of a list with nothing but "or" in it.
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
def readings(text: str, given: bool = False) -> tuple[Answer, ...]:
    """The answers that a text may be, the likeliest first: "1,234" is a number, or a list of two.

    Args:
        given: the text is in a response, where 5m³ and 5 m may have units; in a row they may be formulas.

    Raises:
        Unreadable: it is none.
    """
    if len(text) > LONGEST:
        raise Unreadable(f"it has more than {LONGEST} characters")
    cleaned = clean(text)
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", cleaned)
    if choice := CHOICE.match(plain):
        return (Scalar(choice[1] or choice[2]),)  # "(A) 5" chooses a letter
    if (clock := CLOCK.fullmatch(plain)) and (clock["half"] or clock["minutes"].startswith("0")):
        return (_time(clock),)
    if DURATION.fullmatch(plain) and ":0" in plain:
        return (Words(plain),)
    answers = [_read(_joined(cleaned))]
    if clock:
        answers.append(_time(clock))  # or else the ratio 3:30
    metres = METRES.sub(r" \\text{m}\g<power>", text)
    if given:
        metres = TIGHT_METRES.sub(r"\g<before> \\text{m}\g<power>", metres)
    if metres != text:
        answers.insert(0, _read(_joined(clean(metres))))
    if given and (letter := LETTER.fullmatch(cleaned)):
        answers.append(_read(_joined(rf"{letter[1]} \text{{{letter[2]}}}")))
    if THOUSANDS.fullmatch(cleaned):
        answers.append(_read(cleaned))
    if isinstance(answers[0], Words) and not LIMITING.search(text) and len(numbers := NUMBER.findall(text)) == 1:
        answers.append(_read(_joined(clean(numbers[0]))))  # "Janet makes 18 dollars a day"
    return tuple(answers)


def _time(clock: re.Match[str]) -> Words:
    hour, half = int(clock["hour"]), (clock["half"] or "").lower()
    if not half and hour > 12:
        hour, half = hour - 12, "p"
    return Words(f"{hour}:{clock['minutes']}{half and f' {half}m'}")


def _joined(text: str) -> str:
    """Numbers without the signs between thousands, outside of brackets."""
    joined = ""
    for piece, flat in _pieces(text):
        if flat:
            piece = THOUSANDS.sub(lambda found: found.group().replace(",", ""), piece)
            piece = SPACED.sub(lambda found: found.group().replace(" ", ""), piece)
        joined += piece
    return joined


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


def split(text: str, pattern: str | re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between the places outside of brackets where a pattern fits, and those places."""
    matches = {match.start(): match for match in re.finditer(pattern, text)}
    if not matches:
        return [text], []
    parts, found, depth, start = [], [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in OPEN) - (sign in CLOSE)
        if depth == 0 and place >= start and place in matches:
            parts.append(text[start:place])
            found.append(matches[place].group())
            start = matches[place].end()
    return [*parts, text[start:]], found


def _read(text: str) -> Answer:
    text = bare(text)
    while (start := re.match(r"\\text\s*(?=\{)", text)) and closing(text, start.end()) == len(text) - 1:
        text = bare(text[start.end() + 1 : -1])
    if not text:
        raise Unreadable("it is empty")
    depths = list(itertools.accumulate(1 if sign in OPEN else -1 for sign in BRACKET.findall(text)))
    if depths and (min(depths) < 0 or depths[-1] > 0):
        raise Unreadable("its brackets are not balanced")
    if matrix := MATRIX.fullmatch(text):
        rows = [row for row in matrix[1].split(ROW) if row.strip()]
        cells = (tuple(_read(_joined(cell)) for cell in row.split("&")) for row in rows)
        return Group("matrix", tuple(Group("tuple", row, "()") for row in cells))
    if (cases := CASES.fullmatch(text)) and "\\text" not in text:
        return Group("list", tuple(_read(_joined(row.replace("&", ""))) for row in cases[1].split(ROW) if row.strip()))
    exact, about = split(text, "≈")
    if about:
        named = SYMBOL.fullmatch(exact[0].strip()) and exact[0].strip() != r"\pi"
        text = "=".join(exact[:2]) if named else exact[0]  # "5/12 ≈ 0.417" is 5/12
    items, found = split(_each_named(text), SEPARATOR)
    items = [item for item in items if item.strip()] if found else items
    if len(items) > 1:
        ends = "or" if all("or" in separator for separator in found) else ""
        return _solutions(text) or Group("list", tuple(_flat(map(_read, items))), ends)
    text = bare(items[0]) if items else ""
    if two := RATIO.fullmatch(text):
        text = f"{two[1]}/{two[2]}"
    if (several := _ratio(text)) is not None:
        return several
    member, found = split(text, "∈")
    if len(member) == 2 and SYMBOL.fullmatch(member[0].strip()):
        return _read(member[1])
    sides, signs = split(text, f"[{RELATIONS}]")
    if signs:
        return Relation("".join(signs), tuple(map(_side, sides)))
    parts, signs = split(text, UNION)
    if signs:
        return Group("union", tuple(map(_read, parts)))
    return _group(text) or _signed(text)


def _side(text: str) -> Answer:
    r"""A side of a relation; the B of \angle B is no unit."""
    return Scalar(text.strip()) if "\\" in text and is_name(text) else _read(text)


def _each_named(text: str) -> str:
    """ "a=1,b=5" for "a,b=1,5"; any other text as it is."""
    sides = split(text, "=")[0] if "=" in text else []
    if len(sides) != 2:
        return text
    names, values = (split(side, SEPARATOR)[0] for side in sides)
    if len(names) == len(values) > 1 and all(map(is_name, names)):
        return ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
    return text


def _ratio(text: str) -> Group | None:
    """The ratio of three or more numbers that a text is, as 1:2:3; None where it is none."""
    parts = split(text, ":")[0] if text.count(":") > 1 else []
    items = tuple(map(_read, parts)) if len(parts) > 2 and all(part.strip() for part in parts) else ()
    plain = all(isinstance(item, Scalar) and item.unit is None and not item.percent for item in items)
    return Group("ratio", items) if items and plain else None


def _solutions(text: str) -> Answer | None:
    """The list of tuples that "p=5, q=2; p=7, q=2" is; None where signs do not stand so."""
    parts = [split(part, ",")[0] for part in split(text, ";")[0]]
    if len(parts) < 2 or len(parts[0]) < 2 or len({*map(len, parts)}) > 1:
        return None
    return Group("list", tuple(Group("tuple", tuple(map(_read, part)), "()") for part in parts))


def _flat(items: Iterable[Answer]) -> list[Answer]:
    nested = [item.items if isinstance(item, Group) and item.kind == "list" else (item,) for item in items]
    return list(itertools.chain.from_iterable(nested))


def _group(text: str) -> Answer | None:
    """The group that the brackets around a text make; None where no brackets are around all of it."""
    if not text or text[0] not in "([⦃" or closing(text, 0) != len(text) - 1 or text[-1] == "}":
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
    text = bare(text)
    of, found = _without_unit(text)
    of, percent = (of.rstrip()[:-1].rstrip(), True) if of.rstrip().endswith("%") else (of, False)
    if (value := number_of(of)) is not None:
        return Scalar(of, *value, percent=percent, unit=found)
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    if re.fullmatch(r"[a-zA-Z0-9 '\-.:&()]*", plain) and (run := re.search(r"[a-zA-Z]\.?[a-zA-Z]+", plain)):
        product = len(run.group()) <= 3 and text == run.group() and text.lower() not in SHORT_WORDS
        formula = text if product else None
        if not FUNCTIONS.intersection(re.findall(r"[a-zA-Z]+", text)):
            return Words(_words(plain), formula)
    if re.search(r"(?:^|[^\d_.])[\d.]+\s+\d", of):
        raise Unreadable("two numbers stand side by side")
    if not of.strip():
        raise Unreadable("it has a unit and no number")
    return Scalar(_formula(of), None, bool(re.search(r"\d\.\d", of)), percent, found)


def _words(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .,()'\"")


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
    if text and text[-1] in CURRENCY and text[:-1].rstrip()[-1:].isdigit():
        return text[:-1].rstrip(), unit(text[-1])
    if text.endswith("°") and len(text) > 1 and "°" not in text[:-1]:
        return text[:-1], unit("°")
    if (match := UNIT_TEXT.match(text)) and re.search(r"[\w})%]$", match["of"]):
        if NO_UNIT.search(match["unit"]):
            return text, found
        return match["of"], unit(match["unit"].strip() + match["power"].replace("text", "")) or found
    if (match := UNIT_WORDS.match(text)) and not match["of"].endswith("\\"):
        words = re.findall(r"[a-zA-Z]+", match["unit"])
        known = unit(match["unit"])
        long = (len(words[0]) > 1 or (known and "/" in known.dimension)) and not FUNCTIONS.intersection(words)
        if NO_UNIT.search(re.sub(r"\^\{\d\}", "", match["unit"])):
            return text, found
        if long and (known or (match["gap"] and len(words[0]) > 2) or (match["gap"] and len(words) > 1)):
            return match["of"], known or found
    return text, found
