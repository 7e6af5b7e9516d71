r"""Where the final answer stands in a response: in a \boxed{}, behind a marker such as "####", or at the end.

And one way of writing for what LaTeX and Unicode write in many, see `clean`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

Place = Literal["boxed", "markers", "last"]

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
# `$` opens math before a character that is no space, and closes it behind one, or has blanks on both sides, and no
# number follows it: "costs $5 and $6" and "costs $ 5 and $ 6" hold no math.
MATH = re.compile(
    r"(?=[$\\])(?:\$\$(?P<dollars>(?:\\.|[^$\\])+)\$\$"
    r"|\\\[(?P<bracket>(?:\\[^\[\]]|[^\\])+)\\\]|\\\((?P<paren>(?:\\[^()]|[^\\])+)\\\)"
    r"|(?<![\\$\w])\$(?:(?=[^\s$])(?P<dollar>(?:\\.|[^$\n\\])*(?<=\S))\$(?!\d)"
    r"|(?=[ \t]+[^\s$])(?P<blanks>(?:\\.|[^$\n\\])*(?<=[ \t]))\$(?![\w\\({\[-]|\s*\d)))",
    re.DOTALL,
)
JOINED = re.compile(r"(?:\s|[,;]|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")
# What stands between boxes that are one answer: "\boxed{1} and \boxed{2}", "$x=\boxed{1}$, $y=\boxed{2}$".
NAMED = r"(?:\\[a-zA-Z]+|[A-Z]{2,3}|[a-zA-Z])(?:_\{?\w+\}?)?(?:\([a-zA-Z\d]\))?\s*=\s*"
BETWEEN = re.compile(
    r"(?:\s|[,;$*&]|\\[()\[\],;:!]|\\q?quad|\\text\{\s*,?\s*(?:and|or)\s*\}|(?:and|or)(?![a-zA-Z]))*+"
    rf"(?P<name>{NAMED})?\$?\s*"
)
NAME_BEFORE = re.compile(rf"(?<![\w\\]){NAMED}\$?\s*$")
# The answer ends where its sentence or its reason begins: "5. Then", "5, because", "5 since".
STOP = re.compile(
    r"[.!?](?=\s+(?:[A-Z]|<\|)|\s*\*\*|\s*$)"
    r"|(?:[,;]|(?<!\s))\s+\b(?:because|since|as|so|which|where|when|hence|therefore|but|after)\b"
)
BLANK = r"[ \u00a0\u2009\u202f'\u2019]"  # between thousands
NUMBER = re.compile(
    r"(?=[-+\u2212\\$\u20ac\u00a3\d.])(?<![\w.])(?<!\d:)(?:[-+\u2212]\s?)?\\?[$\u20ac\u00a3]?[-\u2212]?(?=[\d.])"
    rf"(?:\d{{1,3}}(?:{BLANK}\d{{3}})+(?!\d)(?:\.\d+)?|\d+(?::\d+)+(?:\s?[aApP]\.?[mM]\b\.?)?|\d[\d,]*(?:\.\d+)?|\.\d+)"
    r"(?:\s\d+/\d+|/\d+|[eE][-+]?\d+)?(?:\s?\\?%|\u00b0)?(?![\w])"
)
# Characters that are not seen, such as zero-width spaces and marks of direction.
UNSEEN = re.compile(r"[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]")
FORMULA = re.compile(r"[\\^=_(\[{\u221a\u03c0²³]")  # a text without blanks that has one is no plain word or number
RUN, DIGIT = re.compile(r"\S+"), re.compile(r"\d")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
NAME_LENGTH = 30  # characters in front of a box in which its name is looked for
TAIL = 10_000  # characters at the end of a response in which a marker or a last expression is looked for
OPEN, CLOSE = "([{⦃", ")]}⦄"
UNION = "\u222a"
ROW = "\u21b5"  # the end of a row of a matrix
ADVERBS = re.compile(r"(?i)^(?:about|approximately|exactly|around|roughly|only|just|a total of|is|≈)\s*")
_SIGNS = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u2011": "-", "\u00d7": r"\cdot ", "\u00b7": r"\cdot ",
        "\u22c5": r"\cdot ", "\u00f7": "/", "\u2215": "/", "π": r"\pi ", "∞": r"\infty ", "θ": r"\theta ",
        "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "\uff0c": ",", "\uff08": "(", "\uff09": ")", "\u00ba": "°",
        "\uff05": "%",
        "\u00a0": " ", "\u2009": " ", "\u202f": " ", "√": r"\sqrt", "\u2019": "'", "⟨": "(", "⟩": ")", "`": " ",
        "\u2220": r"\angle ",
    }
)  # fmt: skip
POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Sets stand in braces of their own, so that those of LaTeX only group.
_COMMANDS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"(?<!\\)\\\\(?=[a-zA-Z])(?![\s\S]*\\end)", r"\\"),  # a command that was escaped twice
    (r"\\\\(?:\[[^\]]*\])?\s*$", " "),
    (r"\\\\(?:\[[^\]]*\])?", ROW),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|phantom\{[^{}]*\})(?![a-zA-Z])\.?", ""),
    (r"\\[dtc](frac|binom)(?![a-zA-Z])", r"\\\1"),
    (r"(\d)(?:\s*\{\s*,\s*\}|,?\\!|\\[,;: ])\s*(?=\d{3})", r"\1"),  # 1{,}000, 1,\! 000 and 1\,000
    (r"(?<![\w.,'])\d{1,3}(?:'\d{3})+(?![\d'])", lambda found: found.group().replace("'", "")),  # 1'000
    (r"\\[,;:! ]|\\$|\\#|~|\\q?quad|\\hspace\{[^{}]*\}", " "),
    (r"\\(?:textbf|textit|textrm|textsf|mbox|mathrm|rm|hbox|textnormal)\s*(?=\{)", r"\\text"),
    (r"\\(?:mathbf|mathit|boldsymbol|bm|emph|vec)\s*\{([^{}]*)\}", r"\1"),
    (r"\\(?:\{|lbrace(?![a-zA-Z]))", "⦃"),
    (r"\\(?:\}|rbrace(?![a-zA-Z]))", "⦄"),
    (r"\\[lr]?vert(?![a-zA-Z])", "|"),
    (r"\{\s*:\s*\}", ":"),
    (r"\\(?:langle|rangle)(?![a-zA-Z])", lambda found: "(" if found.group() == r"\langle" else ")"),
    (r"\\\$", "$"),
    (r"\\?%|\s*\\text\s*\{\s*percent\s*\}|\s+percent\b", "%"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])", "°"),
    (r"\\leqslant|\\leq|\\le(?![a-zA-Z])|<=|=<", "≤"),
    (r"\\geqslant|\\geq|\\ge(?![a-zA-Z])|>=", "≥"),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"\\approx|\\simeq", "≈"),
    (r"\\equiv|==", "="),
    (r"\\neq|\\ne(?![a-zA-Z])|!=", "≠"),
    (r"\\in(?![a-zA-Z])", "∈"),
    (r"\\cup(?![a-zA-Z])|(?<=[\])])\s*U\s*(?=[\[(])", UNION),
    (r"\\(?:pm|mp)(?![a-zA-Z])|\+/-|\+-", "±"),
    (r"\\(?:varnothing|emptyset)(?![a-zA-Z])|∅", "⦃⦄"),
    (r"(?<![\\a-zA-Z])(?i:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
    (r"(?<![\\a-zA-Z])(?i:pi)(?![a-zA-Z])", r"\\pi "),
    (r"(?<![\\a-zA-Z])sqrt(?![a-zA-Z])", r"\\sqrt"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\*\*", "^"),
    (r"\\(?:times|ast|cdot)(?![a-zA-Z])|\*", r"\\cdot "),
    (r"\\div(?![a-zA-Z])", "/"),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"),
    (r"\^\s*(-?\d+)", r"^{\1}"),
    (r"(?<=\d)[ \t]*\\cdots|\\l?dots(?![a-zA-Z])|\.\.\.|…", "…"),
    (r"\\text\s*\{([^{}]*)\^\{([23])\}\s*\}", r"\\text{\1}^{\2}"),  # \text{ m³}
    (r"(?<=\d)\s*\\text\s*\{\s*(thousand|million|billion|trillion)\b([^{}]*)\}", r" \1 \2 "),
    (r"(?<=\d)\s*\b(thousand|million|billion|trillion)\b", lambda found: rf"\cdot 10^{{{POWERS[found[1]]}}}"),
    (r"\s+", " "),
]  # fmt: skip
COMMANDS = [(re.compile(pattern), to) for pattern, to in _COMMANDS]
# What takes arguments; not \frac{1}{2} and \sqrt{2}, which have their braces.
TAKES = re.compile(
    r"\\(?P<name>frac|binom|sqrt)(?![a-zA-Z]|(?<=t)\{|(?<!t)\{[^{}]*\}\{)(?:\s*\[[^\[\]]*\])?"
    r"|\^(?=\s*\\(?:frac|sqrt)(?![a-zA-Z]))"
)
ARGUMENT = re.compile(r"\s*(?:(?P<brace>\{)|\\(?P<command>[a-zA-Z]+)(?:\[[^\[\]]*\])?|[a-zA-Z]|\d)")
DIGITS = re.compile(r"\s*\d+")
COUNTS = {"frac": 2, "binom": 2, "sqrt": 1}  # arguments of commands


def final_answer(text: str, extract_from: Sequence[Place], markers: Sequence[str]) -> str | None:
    r"""The text of the final answer, None where there is none. The options are those of `math`.

    The first place of `extract_from` that the response has decides; an empty or unclosed \boxed{} holds no answer.
    """
    text = seen(text)
    places: dict[str, Callable[[str], str | None]] = {
        "boxed": lambda text: next(boxed(text), None),
        "markers": lambda text: behind_marker(text[-TAIL:], markers),
        "last": lambda text: last_expression(text[-TAIL:]),
    }
    for place in extract_from:
        if (answer := places[place](text)) is not None:
            return answer.strip() or None
    return None


def seen(text: str) -> str:
    """The text without characters that are not seen."""
    return text if text.isascii() else UNSEEN.sub("", text)


def boxed(text: str) -> Iterator[str]:
    r"""The answers in \boxed{} or \fbox{}, the last one first; "" where the last box is not closed.

    Boxes with nothing but "and", "or", signs and names between them are one answer: "x = 1, y = 2" of
    "x=\boxed{1}, y=\boxed{2}". A box that holds another one is none.
    """
    parts: list[str] = []  # of one answer, from its last box on, with what joins them
    start = len(text)  # of the box that follows
    for box in reversed(list(BOX.finditer(text))):
        content, end = _content(text, box.end(), start)
        if content is None and start < len(text):
            continue
        content = (content or "").strip()
        between = BETWEEN.fullmatch(text, end, start) if content and parts else None
        if between:
            joint = " or " if re.search(r"\bor\b", between.group()) else ", "
            parts += [joint + (between["name"] or ""), content]
        else:
            if parts:
                yield _one(parts[::-1], text[max(0, start - NAME_LENGTH) : start])
            parts = [content] if content else []
            if not content:
                yield ""
        start = box.start()
    if parts:
        yield _one(parts[::-1], text[max(0, start - NAME_LENGTH) : start])


def _one(parts: list[str], before: str) -> str:
    """The answer in boxes, with the text before the first; equal ones without names are one."""
    contents, joints = parts[::2], parts[1::2]
    if len({*contents}) == 1 and not any("=" in joint for joint in joints):
        return contents[0]
    name = NAME_BEFORE.search(before)
    return (name.group().rstrip("$ ") if name else "") + "".join(parts)


def _content(text: str, start: int, stop: int) -> tuple[str | None, int]:
    r"""What a box holds that opens at `start`, and its end; None where it is not closed before `stop`."""
    if not text.startswith("{", start):
        number = re.match(r"-?[\d.,]*\d|[a-zA-Z]\b", text[start : start + 80])  # \boxed 5
        return (number.group(), start + number.end()) if number else (None, start)
    depth = 0
    for brace in BRACE.finditer(text, start, stop):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return None, stop


def behind_marker(text: str, markers: Sequence[str]) -> str | None:
    """What stands behind the last place of the first marker that the text has; None where it has none."""
    for marker in markers:
        edge = r"(?<!\w)" if marker[0].isalnum() else ""
        if found := list(re.finditer(f"(?i:{edge}{re.escape(marker)})", text)):
            behind = text[found[-1].end() :].lstrip(" \t\r\n:*_`=")
            return _statement(behind)
    return None


def _statement(text: str) -> str:
    """The answer with which a text begins: its formulas where it begins with one, or else the rest of its sentence."""
    if found := MATH.match(text):
        parts, end = [inside(found)], found.end()
        while (joint := JOINED.match(text, end)) and (found := MATH.match(text, joint.end())):
            parts, end = [*parts, inside(found)], found.end()
        unit = re.match(r"\s?\\?%|\s+percent\b|\u00b0", text[end:])
        return ", ".join(parts) + (unit.group() if unit else "")
    line = text.partition("\n")[0]
    stop = STOP.search(line)
    return (line[: stop.start()] if stop else line).strip(" \t*_`")


def last_expression(text: str) -> str | None:
    """The last formula or number of a text, whichever ends last; None where there is neither."""
    math = _last(MATH, text)
    start = math.end() if math else 0
    rest = text[start:]
    runs = reversed([*RUN.finditer(rest)])
    formula = next((run for run in runs if FORMULA.search(run.group()) and DIGIT.search(run.group())), None)
    number = _last(NUMBER, rest)
    if formula and (number is None or number.start() < formula.end()):
        return _trimmed(formula.group())
    if number is not None:
        return number.group().strip().rstrip(",")
    return inside(math) if math else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter([*pattern.finditer(text)][-1:]), None)


def inside(math: re.Match[str]) -> str:
    """The formula without the marks around it, of a match of `MATH`."""
    return next(group for group in math.groups() if group is not None).strip()


def _trimmed(run: str) -> str:
    """A run without marks of the sentence around it: "(x=5)." is "x=5", "(1,2)." stays "(1,2)"."""
    run = run.strip("*_`").rstrip(".,;:!?*_`")
    while run.count(")") > run.count("(") and run.endswith(")"):
        run = run[:-1].rstrip(".,;:!?*_`")
    while run.count("(") > run.count(")") and run.startswith("("):
        run = run[1:]
    return run.rpartition("=")[2] if run.count("=") > 1 else run


class Unreadable(ValueError):
    """A text is no answer: nothing, unbalanced brackets, or beyond the limits of this module."""


def clean(text: str) -> str:
    """One way of writing for what LaTeX and Unicode write in many, without the marks around formulas and emphasis."""
    text = MATH.sub(lambda found: f" {inside(found)} ", text)
    text = text.strip()
    text = text[1:-1] if text.startswith("$") and text.endswith("$") else text  # $15 $
    text = re.sub(r"\\[()\[\]](?!\d*(?:pt|em))", " ", text) if r"\begin" not in text else text
    text = text.replace("**", "") if re.search(r"^\*\*|\*\*$", text.strip()) else text
    text = text.translate(_SIGNS)
    for pattern, to in COMMANDS:
        text = pattern.sub(to, text)
    return bare(_braced(text))


def _braced(text: str) -> str:
    r"""The text with braces around what commands take: \frac1y is \frac{1}{y}, x^\frac12 is x^{\frac{1}{2}}."""
    for command in reversed(list(TAKES.finditer(text))):  # so those on the right have their braces
        place, taken = command.end(), ""
        for _ in range(COUNTS.get(command["name"], 1)):
            if (end := _argument_end(text, place, command["name"] == "sqrt")) is None:
                break
            argument = text[place:end].strip()
            taken += argument if argument.startswith("{") else f"{{{argument}}}"
            place = end
        text = text[: command.end()] + taken + text[place:]
    return text


def _argument_end(text: str, start: int, digits: bool) -> int | None:
    r"""The end of an argument: braces, a command with its own arguments, a letter, a digit; all `digits` of \sqrt12."""
    if digits and (number := DIGITS.match(text, start)):
        return number.end()
    found = ARGUMENT.match(text, start)
    if found is None:
        return None
    if found["brace"]:
        return closing(text, found.start("brace")) + 1 or None
    end = found.end()
    for _ in range(COUNTS.get(found["command"], 0)):
        end = closing(text, end) + 1
    return end or None


def bare(text: str) -> str:
    """Without blanks and marks of a sentence around it, and without braces around all of it."""
    while True:
        before = text
        text = re.sub(r"^[\s:;,.!?_]+(?!\d)|^[\s:;,]+|[\s:;,.?_]+$", "", ADVERBS.sub("", text))
        if text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            return text


def closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`; -1 without one."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in OPEN) - (text[place] in CLOSE)
        if depth == 0:
            return place
    return -1
