"""Does a response reach the number of a math word problem? GSM8K, arXiv 2110.14168."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

from rft.reward.term import REWARDS

GOLD_MARKER = "####"
# A sign counts only where no operand stands before it: "10-5" ends in 5, "x=-5" in -5. Signs between digits must cut
# thousands: "72,5" is no number. A number that continues as a fraction or a power does not count: "1/2" is not 1.
THOUSANDS = r"(?:,|\{,\}|\\,|[\u00a0\u2009\u202f'\u2019])"
NUMBER = re.compile(
    r"(?=[-\u2212\\$0-9])(?<![0-9])(?:[-\u2212](?<![\w)].)(?:\\?\$ ?)?|\\?\$ ?[-\u2212]?)?"
    rf"(?:[0-9]{{1,3}}(?:{THOUSANDS}[0-9]{{3}})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+"
    r"(?![,/^'\u2019][0-9]|\{,\}|[eE][-+]?[0-9])"
)
NO_DIGITS = re.compile(r"[^0-9.-]")


def _no_marker(method: str, markers: list[str]) -> str | None:
    if all(markers) and (markers or method == "flexible"):
        return None
    return f"markers: {markers!r} gives no text to look for; write [{GOLD_MARKER!r}]"


def _stated(response: str, method: str, markers: list[str]) -> str | None:
    number = number_of(response, method, markers)
    if number is None:
        return None
    text = f"{number:f}" if number else "0"  # not -0
    return text.rstrip("0").rstrip(".") if "." in text else text


def _gold(row: Mapping[str, Any]) -> Decimal:
    return gold_number(str(row["answer"]))


def _written(row: Mapping[str, Any], method: str, markers: list[str]) -> list[str]:
    """The gold number behind each marker, and as the last number of a text if this counts."""
    number = _gold(row)
    texts = [f"{marker} {number:f}" for marker in markers]
    for marker in markers[:1]:
        thought = f"<think>Perhaps {marker} 0.5</think>\n"
        texts += [f"It costs ${number:,f}.\n{marker} ${number:,f}.", f"{thought}{marker} {number:f}"]
    if method == "flexible":
        texts += [f"The answer is {number:f}.", f"So it is \\boxed{{{number:f}}}.", f"First 2, then\n{number:,f}"]
    solution = str(row["answer"])
    return [*texts, solution] if GOLD_MARKER in markers and GOLD_MARKER in solution else texts


@REWARDS.register(
    "gsm8k", reads=("answer",), thoughts="skip", fault=_no_marker, extract=_stated, gold=_gold, writes=_written
)
def gsm8k(response: str, row: Mapping[str, Any], *, method: Literal["strict", "flexible"], markers: list[str]) -> float:
    """1 where the response's number equals that of the row's `answer`, else 0.

    Numbers are compared by value: "$1,000", "1000." and "1000.0" are the same. The gold number is what follows #### in
    `answer`, or `answer` itself where it is a plain number.

    Args:
        method: "strict": the number right behind the last marker; "flexible": that, or else the last number anywhere.
        markers: what stands before the final number.

    Raises:
        ValueError: the row's `answer` holds no number.
    """
    return float(number_of(response, method, markers) == _gold(row))


def number_of(response: str, method: str, markers: Sequence[str]) -> Decimal | None:
    """The number in a response, with the options of `gsm8k`; None where there is none."""
    number = marked_number(response, markers)
    if number is None and method == "flexible":
        numbers = NUMBER.findall(response)
        number = value(numbers[-1]) if numbers else None
    return number


def gold_number(answer: str) -> Decimal:
    """The number of an `answer` of the data set.

    Raises:
        ValueError: there is none.
    """
    number = marked_number(answer, [GOLD_MARKER])
    if number is None:
        plain = NUMBER.fullmatch(answer.strip().removesuffix("%").rstrip("\\ "))
        if plain is None:
            raise ValueError(
                f"the field 'answer' holds no number behind {GOLD_MARKER}: {answer[-80:]!r}; write it or remove the row"
            )
        number = value(plain.group())
    return number


def marked_number(text: str, markers: Sequence[str]) -> Decimal | None:
    """The number right behind the last marker, or None where that is no number or there is no marker."""
    ends = [found.end() for marker in markers for found in re.finditer(_marker(marker), text)]
    found = NUMBER.match(text, max(ends)) if ends else None
    return value(found.group()) if found else None


def _marker(marker: str) -> str:
    """A pattern for the marker and the blanks behind it; "A:" is not found in "USA:"."""
    return (r"\b" if marker[0].isalnum() else "") + re.escape(marker) + r"[ \t]*+"


def value(number: str) -> Decimal:
    """The value of a text that `NUMBER` matched."""
    return Decimal(number if number.isdigit() else NO_DIGITS.sub("", number.replace("\u2212", "-")))
