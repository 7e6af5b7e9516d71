"""Does a response choose the right letter of a multiple-choice question?"""

import re
from collections.abc import Mapping
from typing import Any

from rft.reward.registry import REWARDS

# What may stand around a letter: "**B**", "(B)", "\boxed{B}", "\boxed{\text{B}}".
OPEN = r"(?:\\boxed\{|\\text\{|[\s*_:($\[])*"
CLOSE = r"(?![\w'])"


def _fault(options: Mapping[str, Any]) -> str | None:
    letters, markers = options["letters"], options["markers"]
    if not letters.isalpha() or len({*letters.upper()}) < max(2, len(letters)):
        return f"letters={letters!r}: write the letters that there are to choose from, such as ABCD"
    if not all(markers):
        return f"markers: {markers!r} has one without text; write ['answer is', 'answer:']"
    return None


def _chosen(response: str, letters: str, markers: list[str]) -> str | None:
    letter = f"{OPEN}([{letters.upper()}]){CLOSE}"
    for marker in (r"\\boxed\{", *(rf"\b{re.escape(marker)}" for marker in markers)):
        if found := re.findall(f"(?i:{marker}){letter}", response):
            return str(found[-1])
    alone = re.match(letter, response)  # "B", "(B) Paris", "B. Paris"; not "A cat"
    return alone[1] if alone and re.match(r"\s*(?:$|[.):*\]}$])", response[alone.end() :]) else None


def _gold(row: Mapping[str, Any], letters: str) -> str:
    answer = str(row["answer"]).strip().strip("().").upper()
    if len(answer) != 1 or answer not in letters.upper():
        raise ValueError(f"the field 'answer' is none of the letters {letters}: {row['answer']!r:.80}; remove the row")
    return answer


def _written(row: Mapping[str, Any], letters: str, markers: list[str]) -> list[str]:
    letter = _gold(row, letters)
    texts = [letter, f"({letter}) is it.", f"So $\\boxed{{{letter}}}$.", f"\\boxed{{\\text{{({letter})}}}}"]
    for marker in markers:
        thought = f"<think>Perhaps the {marker} {letters[0].upper()}.</think> "
        texts += [f"The {marker} ({letter}).", f"{thought}The {marker} **{letter}**"]
    return texts


@REWARDS.register(
    "choice", reads=("answer",), thoughts="skip", fault=_fault, extract=_chosen, gold=_gold, writes=_written
)
def choice(response: str, row: Mapping[str, Any], *, letters: str, markers: list[str]) -> float:
    r"""1 where the letter that the response chooses is the row's `answer`, else 0.

    The letter is the one in the last \boxed{}, or else behind the last of the first marker that is there, or else the
    one that the response begins with where it stands for itself: "B", "(B) Paris", but not "A cat".

    Args:
        letters: that there are to choose from; capital in a response, either in an `answer`.
        markers: what stands before the chosen letter, in any case, the more trusted first.

    Raises:
        ValueError: the row's `answer` is none of the letters.
    """
    return float(_chosen(response, letters, markers) == _gold(row, letters))
