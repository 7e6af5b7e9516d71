"""One way of writing for what LaTeX and Unicode write in many."""

import re
from collections.abc import Callable

from rft.reward.rules.math_check.answer import MATH, inside

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
