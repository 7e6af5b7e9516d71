"""Rewards that compare the text of the response."""

from collections.abc import Mapping
from typing import Any

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
