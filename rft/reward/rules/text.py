"""Rewards that compare or match the text of the response."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from rft.reward.term import REWARDS


def gold_text(row: Mapping[str, Any]) -> str:
    """The row's `answer` as a text without white space at its ends.

    Raises:
        ValueError: it is empty or no single value.
    """
    answer = row["answer"]
    if isinstance(answer, list | dict):
        raise ValueError(
            f"the field 'answer' is a {type(answer).__name__}, which no response equals; write a text, or choose a "
            "reward that reads it"
        )
    if not (text := str(answer).strip()):
        raise ValueError("the field 'answer' is empty, so no answer is right; write one, or remove the row")
    return text


def _whole(response: str, strip: bool) -> str:
    return response.strip() if strip else response


def _written(row: Mapping[str, Any], strip: bool) -> list[str]:
    answer = str(row["answer"])
    return [answer, f"\n {answer} \n"] if strip else [answer]


@REWARDS.register("exact_match", reads=("answer",), thoughts="skip", extract=_whole, gold=gold_text, writes=_written)
def exact_match(response: str, row: Mapping[str, Any], *, strip: bool) -> float:
    """1 where the response is the row's `answer`, else 0.

    Args:
        strip: white space at both ends of either does not count.
    """
    return float(_whole(response, strip) == _whole(str(row["answer"]), strip))


def bad_pattern(pattern: str) -> str | None:
    try:
        re.compile(pattern)
    except re.error as error:
        return f"pattern: {pattern!r} is not a regular expression ({error})"
    return None


@REWARDS.register("format", thoughts="show", fault=bad_pattern)
def format_match(response: str, row: Mapping[str, Any], *, pattern: str, match: Literal["whole", "anywhere"]) -> float:
    """1 where the response has the form that a regular expression describes, else 0.

    Args:
        pattern: in the syntax of Python's `re`; flags go in front, as in "(?s)".
        match: must it fit the whole response, or is one place enough.
    """
    found = re.fullmatch(pattern, response) if match == "whole" else re.search(pattern, response)
    return float(found is not None)
