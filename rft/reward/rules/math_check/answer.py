r"""Where the final answer stands in a response: in a \boxed{}, behind a marker such as "####", or at the end."""

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
        if (found := places[place](text)) is not None:
            return found.strip() or None
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
