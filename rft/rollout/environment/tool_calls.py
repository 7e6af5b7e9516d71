"""How a model writes tool calls: registered functions that find them in the text of an answer.

A function f(text, tools, *, options) takes the text of an answer without special tokens and the schemas of the tools by
name. It returns the content beside the calls, and every call: a `ToolCall`, or a text that says why it cannot be read.
Fact: `described`, False if the prompt does not describe the tools, because the model knows them from its training.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rft.registry import Registry
from rft.rollout.environment.contract import Schema

TOOL_CALLS = Registry("format of tool calls", described=True)
BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
OPEN = "<tool_call>"


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


@TOOL_CALLS.register("hermes")
def hermes(text: str, tools: Mapping[str, Schema]) -> Found:
    """Blocks `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes models write them."""
    found: list[ToolCall | str] = [_from_json(block) for block in BLOCK.findall(text)]
    rest = BLOCK.sub("", text)
    if OPEN in rest:
        found.append("a <tool_call> is not closed")
        rest = rest[: rest.index(OPEN)]
    return rest.strip(), found


def _from_json(block: str) -> ToolCall | str:
    try:
        call = json.loads(block)
    except (ValueError, RecursionError) as error:
        return f"the call is no JSON ({error})"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'the call is no object {"name": ..., "arguments": {...}}'
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return "the arguments of the call are no object"
    return ToolCall(call["name"], arguments)


@TOOL_CALLS.register("mark", described=False)
def mark(text: str, tools: Mapping[str, Schema], *, marks: dict[str, str]) -> Found:
    """An answer that begins with a mark is a call, for small models: `?12` calls the tool of `?` with "12".

    Args:
        marks: the tool of each mark. The text behind the mark is the first argument of a tool that takes any.
    """
    for sign, name in marks.items():
        if text.startswith(sign):
            properties = tools[name]["function"]["parameters"]["properties"] if name in tools else {}
            rest = text.removeprefix(sign)
            return text, [ToolCall(name, {argument: rest for argument in list(properties)[:1]})]
    return text, []


def assistant_message(content: str, calls: list[ToolCall | str]) -> dict[str, Any]:
    """The chat message of an answer, for templates."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    made = [call for call in calls if isinstance(call, ToolCall)]
    if made:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in made
        ]
    return message
