"""Rewards that look at the text alone."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from rft.reward.registry import REWARDS


def _whole(response: str, strip: bool) -> str:
    return response.strip() if strip else response


@REWARDS.register("exact_match", reads=("answer",), extract=_whole)
def exact_match(response: str, row: Mapping[str, Any], *, strip: bool) -> float:
    """1 where the response is the row's `answer`, else 0.

    Args:
        strip: white space at both ends of either does not count.
    """
    return float(_whole(response, strip) == _whole(str(row["answer"]), strip))


def _bad_pattern(options: Mapping[str, Any]) -> str | None:
    try:
        re.compile(options["pattern"])
    except re.error as error:
        return f"pattern: {options['pattern']!r} is not a regular expression ({error})"
    return None


@REWARDS.register("format", fault=_bad_pattern)
def format_match(response: str, row: Mapping[str, Any], *, pattern: str, match: Literal["whole", "anywhere"]) -> float:
    """1 where the response has the form that a regular expression describes, else 0.

    Args:
        pattern: in the syntax of Python's `re`; flags go in front, as in "(?s)".
        match: must it fit the whole response, or is one place enough.
    """
    found = re.fullmatch(pattern, response) if match == "whole" else re.search(pattern, response)
    return float(found is not None)
