"""The calls of an answer: thoughts are cut, for they call nothing, and the format of the run reads the rest."""

import re
from collections.abc import Mapping

from rft.batch.thoughts import MARKS
from rft.data.tool_calls.base import Found, Schema
from rft.registry import Plugin


def calls_of(text: str, tools: Mapping[str, Schema], format: Plugin, prompt_opens: str | None) -> Found:
    """The content of an answer and its calls.

    Args:
        text: of the answer; special tokens are left out but for the format's `marks`.
        tools: schemas by the names of the tools.
        format: of `TOOL_CALLS`.
        prompt_opens: the mark of the thought in which the prompt ends, a key of `rft.batch.thoughts.MARKS`, or None.

    Returns:
        The content begins with the thoughts before the first call, as they are: a template that renders the answer
        again writes or drops them. Thoughts behind a call are left out. An answer whose thought does not end is content
        without calls.
    """
    parts = without_thoughts(text, format, MARKS, prompt_opens)
    if parts is None:
        return text, []
    thoughts, rest = parts
    answer = rest.lstrip() if thoughts else rest
    content, calls = format(answer, tools)
    blanks = rest[: len(rest) - len(answer)] if content else ""
    return f"{thoughts}{blanks}{content}", calls


def without_thoughts(
    text: str, format: Plugin, thoughts: Mapping[str, str], prompt_opens: str | None
) -> tuple[str, str] | None:
    """The text up to the end of the last thought before the first call, and the text behind it without thoughts.

    A mark within a call opens no thought.

    Args:
        text: of the answer.
        format: of `TOOL_CALLS`.
        thoughts: the mark that closes a thought, by the one that opens it.
        prompt_opens: the mark of the thought in which the prompt ends, or None.

    Returns:
        None if a thought before the first call does not end.
    """
    closing = format.facts.closing
    marks = re.compile("|".join(map(re.escape, (*thoughts, *format.facts.openings))))
    kept: list[str] = []  # behind the first call
    front = begin = place = 0  # the end of the thoughts before the first call, of the last thought, and of what is read
    called = False
    opened = prompt_opens
    while True:
        if opened is None:
            mark = marks.search(text, place)
            if mark is None:
                break
            place = mark.end()
            if mark[0] not in thoughts:
                called = True
                end = -1 if closing is None else text.find(closing, place)
                if closing is None or end < 0:
                    break
                place = end + len(closing)
                continue
            kept += [text[begin : mark.start()]] if called else []
            opened = mark[0]
        end = text.find(thoughts[opened], place)
        if end < 0:
            return (text[:front], "".join(kept)) if called else None
        begin = place = end + len(thoughts[opened])
        front = front if called else begin
        opened = None
    return text[:front], "".join([*kept, text[begin:]])
