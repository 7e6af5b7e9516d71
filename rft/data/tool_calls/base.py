"""What formats of tool calls share: a call, the registry, the calls of an answer, and how they stand in a chat message.

A format is a registered function f(text, tools, *, options). It takes the text of an answer without thoughts, and the
schemas of the tools by name. It returns the content beside the calls, and every call: a `ToolCall`, or a text that says
why it cannot be read, for the model to learn from. It raises nothing, evaluates nothing, and takes time linear in the
length of the text. Without torch and transformers: workers of rewards import this package.

Facts of a format:
    described: False if the prompt does not describe the tools, because the model knows them from its training.
    marks: the texts that open, separate and close calls. Where they are special tokens of the tokenizer, the text of an
        answer must keep them.
    openings: the texts with which a call may begin; what follows one is no thought.
    closing: the text with which calls end, where content or a thought may follow; None where none may.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft.batch.thoughts import MARKS
from rft.data.strict_json import value_of
from rft.registry import Plugin, Registry

TOOL_CALLS = Registry("format of tool calls", described=True, marks=(), openings=(), closing=None)
NAME = r"[\w.:/-]+"  # of a tool, in formats that do not write it as a JSON text
Schema = dict[str, Any]  # of a tool: {"type": "function", "function": {"name", "description", "parameters"}}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: by their names.
    """

    name: str
    arguments: dict[str, Any]


Found = tuple[str, list[ToolCall | str]]


def blocks(text: str, opening: str, closing: str) -> tuple[str, list[str], str | None]:
    """What stands between marks.

    Returns:
        The text outside of the marks, the text of each block, and that of a last block which is not closed, or None.
    """
    outside: list[str] = []
    inside: list[str] = []
    place = 0
    while (start := text.find(opening, place)) >= 0:
        outside.append(text[place:start])
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            return "".join(outside), inside, text[start:]
        inside.append(text[start:end])
        place = end + len(closing)
    return "".join([*outside, text[place:]]), inside, None


def call_of(value: Any, keys: tuple[str, ...] = ("arguments",)) -> ToolCall | str:
    """The call that a JSON value is, or why it is none.

    Args:
        keys: one of them has the arguments; a call without any of them has none.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return f'the call is no object {{"name": ..., "{keys[0]}": {{...}}}}'
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if not isinstance(arguments, dict):
        return "the arguments of the call are no object"
    return ToolCall(value["name"], arguments)


def named_call(name: str, arguments: str) -> ToolCall | str:
    """The call of a tool with the JSON text of its arguments, or why it is none."""
    try:
        value = value_of(arguments)
    except ValueError as error:
        return f"the arguments of {name} are no JSON ({error})"
    return call_of({"name": name, "arguments": value})


def assistant_message(content: str, calls: list[ToolCall | str]) -> dict[str, Any]:
    """The chat message of an answer, for templates."""
    made = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
        if isinstance(call, ToolCall)
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": made} if made else {})


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
