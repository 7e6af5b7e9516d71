r"""Where the final answer stands in a response: in a \boxed{}, behind a marker such as "####", or at the end."""

import re
from collections.abc import Callable, Sequence
from typing import Literal

Place = Literal["boxed", "markers", "last"]

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
# `$` opens math before a character that is no space, and closes it behind one; "costs $5 and $6" holds no math.
MATH = re.compile(
    r"\$\$(?P<dollars>.+?)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<paren>.+?)\\\)"
    r"|(?<![\\$\w])\$(?=[^\s$])(?P<dollar>(?:\\.|[^$\n\\])*(?<=\S))\$(?!\d)",
    re.DOTALL,
)
JOINED = re.compile(r"(?:\s|[,;]|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)*")
# The answer ends where its sentence or its reason begins: "5. Then", "5, because", "5 since".
STOP = re.compile(
    r"[.!?](?=\s+[A-Z]|\s*\*\*|\s*$)|[,;]?\s+\b(?:because|since|as|so|which|where|when|hence|therefore|but|after)\b"
)
NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?\s?\\?[$\u20ac\u00a3]?[-\u2212]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
    r"(?:\s\d+/\d+|/\d+|[eE][-+]?\d+)?(?:\s?\\?%|\u00b0)?(?![\w])"
)
FORMULA = re.compile(r"[\\^=_(\[{\u221a\u03c0]")  # what a text without blanks has that is more than a word or a number
TAIL = 10_000  # characters at the end of a response in which a marker or a last expression is looked for


def final_answer(text: str, extract_from: Sequence[Place], markers: Sequence[str]) -> str | None:
    r"""The text of the final answer, None where there is none. The options are those of `math`.

    The first place of `extract_from` that the response has decides; an empty or unclosed \boxed{} holds no answer.
    """
    places: dict[str, Callable[[str], str | None]] = {
        "boxed": last_boxed,
        "markers": lambda text: behind_marker(text[-TAIL:], markers),
        "last": lambda text: last_expression(text[-TAIL:]),
    }
    for place in extract_from:
        if (found := places[place](text)) is not None:
            return found.strip() or None
    return None


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{} or \fbox{}; "" where it is not closed, None where there is none."""
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if not text.startswith("{", start):
        number = re.match(r"-?[\d.,]*\d|[a-zA-Z]\b", text[start : start + 80])  # \boxed 5
        return number.group() if number else ""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start + 1 : start + brace.start()]
    return ""


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
    runs = [run for run in re.finditer(r"\S+", rest) if FORMULA.search(run.group()) and re.search(r"\d", run.group())]
    number = _last(NUMBER, rest)
    if runs and (number is None or number.start() < runs[-1].end()):
        return _trimmed(runs[-1].group())
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
