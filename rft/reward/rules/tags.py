"""Does a response have its parts between tags, as in "<think> ... </think> <answer> ... </answer>"?"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rft.reward.term import REWARDS

NAME = re.compile(r"[A-Za-z_][\w.:-]*")


def bad_tag(option: str, tag: str | None) -> str | None:
    """The message about an option with a text that is no name of a tag; None where it is one, or null."""
    right = tag is None or NAME.fullmatch(tag)
    return None if right else f"{option}: {tag!r} is no name of a tag; write it without brackets: think"


def last_block(response: str, tag: str | None) -> str | None:
    """The text between the last closing tag and the opening tag before it; None where there is no such pair.

    Without a tag it is the whole response.
    """
    if tag is None:
        return response
    end = response.rfind(f"</{tag}>")
    start = response.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else response[start + len(f"<{tag}>") : end]


def _fault(tags: list[str]) -> str | None:
    if not tags or len({*tags}) < len(tags):
        return f"tags: {tags!r} must be one or more different names, such as [think, answer]"
    return next((fault for tag in tags if (fault := bad_tag("tags", tag))), None)


def _marks(tags: Sequence[str]) -> list[str]:
    """The opening and the closing mark of each tag in order."""
    return [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]


def _opening(tags: list[str]) -> str:
    return "".join(_marks(tags)[:1])


@REWARDS.register("tags", thoughts="show", opening=_opening, fault=_fault)
def tags_in_order(
    response: str,
    row: Mapping[str, Any],
    *,
    tags: list[str],
    outside: Literal["blank", "after", "any"],
    empty: bool,
) -> float:
    """1 where each tag is opened and closed exactly once, one behind the other in the order of the list, else 0.

    A tag inside another tag of the list is not one behind the other. Tags that the list does not name are text.

    Args:
        tags: the names, without brackets; capital and small letters differ.
        outside: where text may stand outside of the tags: "blank": nowhere, "after": behind the last tag, "any".
        empty: a tag may hold nothing but white space.
    """
    marks = _marks(tags)
    pattern = "|".join(map(re.escape, marks))
    if re.findall(pattern, response) != marks:
        return 0.0
    written = [bool(part.strip()) for part in re.split(pattern, response)]
    inside, around = written[1::2], written[::2]
    if outside != "any" and any(around[:-1] if outside == "after" else around):
        return 0.0
    return float(empty or all(inside))


@REWARDS.register("tag_count", thoughts="show", opening=_opening, fault=_fault)
def tag_count(response: str, row: Mapping[str, Any], *, tags: list[str]) -> float:
    """The share of the opening and closing marks that are in the response exactly once, in any order.

    Args:
        tags: the names, without brackets; capital and small letters differ.
    """
    marks = _marks(tags)
    return sum(response.count(mark) == 1 for mark in marks) / len(marks)
