"""The reward of the verdict that a response comes to, by a regular expression."""

import re
from collections.abc import Mapping
from typing import Any

from rft.reward.rules.text import bad_pattern, gold_text
from rft.reward.term import REWARDS


def bad_group(pattern: str) -> str | None:
    """The error of a pattern that needs exactly one group, or None."""
    if (fault := bad_pattern(pattern)) is not None:
        return fault
    return None if re.compile(pattern).groups == 1 else f"pattern: {pattern!r} needs one group, around the verdict"


def last_group(text: str, pattern: str) -> str | None:
    """The group of a pattern's last match in lower case; None without a match."""
    found = [match[1] or "" for match in re.finditer(pattern, text)]
    return found[-1].strip().casefold() if found else None


def _verdicts(row: Mapping[str, Any], pattern: str) -> list[str]:
    answer = gold_text(row)
    texts = [f"Verdict: {answer}", f"It is long. **Verdict:** {answer}", f"Verdict: unsure. Verdict: {answer}", answer]
    return [text for text in texts if last_group(text, pattern) is not None]


def _verdict_gold(row: Mapping[str, Any], pattern: str) -> None:
    answer = gold_text(row).casefold()
    found = {last_group(text, pattern) for text in (answer, *_verdicts(row, pattern))} - {None}
    if found and answer not in found:
        raise ValueError(
            f"the field 'answer' is {answer!r:.60}, which the pattern {pattern!r} takes from no response; write it as "
            "the pattern takes it, or change the pattern"
        )


@REWARDS.register(
    "verdict",
    reads=("answer",),
    thoughts="skip",
    fault=bad_group,
    extract=last_group,
    gold=_verdict_gold,
    writes=_verdicts,
)
def verdict(response: str, row: Mapping[str, Any], *, pattern: str) -> float:
    """1 where the verdict that the response comes to is the row's `answer`, in any case, else 0.

    Args:
        pattern: in the syntax of Python's `re`, with one group, which is the verdict; the last place where it fits
            counts.
    """
    return float(last_group(response, pattern) == str(row["answer"]).strip().casefold())
