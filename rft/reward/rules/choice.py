"""Does a response choose the right letter of a multiple-choice question?"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rft.reward.term import REWARDS

# What may stand around a letter: "**B**", "(B)", "\(B\)", "option B", "\boxed{\text{B}}". So many at most, or
# the time for a text of nothing but such signs would grow with the square of its length.
OPEN = r"(?:\\(?:boxed|fbox|text|textbf|mathrm|mathbf)\{|\\[(\[]|(?i:option|choice)\s|[\s*_:($\[]){0,40}+"
CLOSE = r"(?![\w'])"
# A small letter is one where a sign follows or its line ends: "Answer: c", not "the answer is a cat".
SMALL_CLOSE = r"(?=[)\]}:]|\\[)\]]|\.\s|[ \t.*_$]*+(?:\n|\Z|</))"
# "A" and "I" are no letters in "A train leaves", "I think"; they are in "A because", "A is right".
WORD = r"[AI][ \t]+(?!(?:and|as|because|but|by|due|for|given|if|is|or|since|which|with)\b)[a-z]"
PLACES = (r"\\boxed\{", "<answer>")


def _fault(letters: str, markers: list[str]) -> str | None:
    if not letters.isalpha() or len({*letters.upper()}) < max(2, len(letters)):
        return f"letters={letters!r}: write the letters that there are to choose from, such as ABCD"
    if not all(markers):
        return f"markers: {markers!r} has one without text; write ['answer is', 'answer:']"
    return None


@lru_cache
def _patterns(letters: str, markers: tuple[str, ...]) -> tuple[list[re.Pattern[str]], re.Pattern[str]]:
    """Patterns whose group is a letter: in the places where it is looked for, and at the start of a response."""
    letter = f"{OPEN}((?!{WORD})[{letters}]{CLOSE}|[{letters.lower()}]{SMALL_CLOSE})"
    places = [*PLACES, *(rf"(?i:\b{re.escape(marker)})" for marker in markers)]
    alone = rf"{OPEN}([{letters}]){CLOSE}(?=\s*(?:$|[.):*\]}}$]|\\[)\]]))"  # "B", "(B) Paris", "B. Paris"; not "A cat"
    return [re.compile(place + letter) for place in places], re.compile(alone)


def _chosen(response: str, letters: str, markers: list[str]) -> str | None:
    places, alone = _patterns(letters.upper(), tuple(markers))
    for place in places:
        if letters_there := place.findall(response):
            return str(letters_there[-1]).upper()
    first = alone.match(response)
    return first[1] if first else None


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

    The letter is the one in the last \boxed{}, or else in the last <answer>, or else behind the last of the first
    marker that is there, or else the one that the response begins with where it stands for itself: "B", "(B) Paris". A
    letter that is a word is none: "A cat", "the answer is a cat", "I think".

    Args:
        letters: that there are to choose from; capital, or small in a box and behind a marker.
        markers: what stands before the chosen letter, in any case, the more trusted first.

    Raises:
        ValueError: the row's `answer` is none of the letters.
    """
    return float(_chosen(response, letters, markers) == _gold(row, letters))
