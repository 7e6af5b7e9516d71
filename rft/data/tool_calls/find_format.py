"""Which format of tool calls a chat template writes."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rft.batch.thoughts import MARKS
from rft.data.tool_calls.base import TOOL_CALLS, Schema, ToolCall, assistant_message, calls_of
from rft.registry import Plugin

if TYPE_CHECKING:  # worker processes of rewards start without transformers
    from rft.data.encode.base import Template

QUESTION = {"role": "user", "content": "question"}
VALUES: dict[str, Any] = {
    "string": 'a "b"\nc',
    "integer": 3,
    "number": 0.5,
    "boolean": True,
    "null": None,
    "array": [1, "two"],
    "object": {"ключ": [False]},
}
PROPERTIES = {kind: {"type": kind, "description": kind} for kind in VALUES}
PARAMETERS = {"first_tool": {}, "second_tool": PROPERTIES}
TOOLS: dict[str, Schema] = {
    name: {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }
    for name, properties in PARAMETERS.items()
}
FIRST, SECOND = ToolCall("first_tool", {}), ToolCall("second_tool", VALUES)


def find_format(chat: "Template") -> str | None:
    """The name of the format that reads the calls of answers as a template renders them.

    Args:
        chat: of the run.

    Returns:
        None if the template renders no calls, or no format without options reads them.
    """
    for name in TOOL_CALLS.names():
        try:
            format = TOOL_CALLS.build({"name": name}, "name")
        except ValueError:  # it has options
            continue
        if reads_calls(chat, read_by(format)):
            return name
    return None


def read_by(format: Plugin) -> Callable[["CallingTurn"], bool]:
    """What `reads_calls` asks of a format."""
    return lambda turn: turn.reads(format)


def reads_calls(chat: "Template", reads: Callable[["CallingTurn"], bool]) -> bool:
    """Whether the calls come back of answers as a template renders them: one with a call without arguments, one with a
    value of each JSON type, and one with both calls.

    A template that renders one call of an answer alone is judged by single calls.

    Args:
        reads: says whether the calls of an answer are read.
    """
    turns = _turns(chat)
    return all(turns[:2]) and all(turn is None or reads(turn) for turn in turns)


@lru_cache(maxsize=1)  # every format is asked, before the run and when its episodes are built
def _turns(chat: "Template") -> list["CallingTurn | None"]:
    """The answers of `reads_calls`, rendered once for the template of a run."""
    return [_rendered(chat, calls) for calls in ([FIRST], [SECOND], [FIRST, SECOND])]


@dataclass(frozen=True)
class CallingTurn:
    """An answer with calls that a template rendered.

    Attributes:
        prompt, text: before the answer, and the answer, with special tokens.
        calls: that it has.
        special: the special tokens of the tokenizer.
        prompt_opens: as for `calls_of`.
    """

    prompt: str
    text: str
    calls: list[ToolCall]
    special: set[str]
    prompt_opens: str | None

    def reads(self, format: Plugin) -> bool:
        """Whether a format reads the calls of the answer."""
        left_out = self.special - {*format.facts.marks, *MARKS, *MARKS.values()}
        text = re.sub("|".join(map(re.escape, left_out)) or "(?!)", "", self.text)
        return calls_of(text, TOOLS, format, self.prompt_opens)[1] == self.calls


def _rendered(chat: "Template", calls: list[ToolCall]) -> CallingTurn | None:
    """An answer with calls; None where the template cannot render them, or leaves one of them out."""
    message = assistant_message("", list(calls))
    tools = list(TOOLS.values()) if chat.takes_tools else None
    try:
        prompt = chat.prompt([QUESTION], tools)
        asked = chat.render([QUESTION], tools, False)
        whole = chat.render([QUESTION, message], tools, False)
    except ValueError:
        return None
    # Where the answer does not continue the prompt, such as one that begins a thought, it begins behind the question.
    start = prompt if whole.startswith(prompt) else asked
    text = whole.removeprefix(start)
    if any(call.name not in text for call in calls):
        return None
    opened = next((mark for mark in MARKS if prompt.rstrip().endswith(mark)), None) if start == prompt else None
    return CallingTurn(start, text, calls, {*chat.special.values()}, opened)
