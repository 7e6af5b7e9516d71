"""Calls of small models: an answer that begins with a mark."""

from collections.abc import Mapping

from rft.data.tool_calls.base import TOOL_CALLS, Found, Schema, ToolCall
from rft.data.tool_calls.values import properties


@TOOL_CALLS.register("mark", described=False, openings=lambda marks: tuple(marks))
def mark(text: str, tools: Mapping[str, Schema], *, marks: dict[str, str]) -> Found:
    """An answer that begins with a mark is a call, for small models: `?12` calls the tool of `?` with "12".

    Args:
        marks: the tool of each mark. The text behind the mark is the first argument of a tool that takes any.
    """
    for sign, name in marks.items():
        if text.startswith(sign):
            rest = text.removeprefix(sign)
            return text, [ToolCall(name, {argument: rest for argument in list(properties(tools, name))[:1]})]
    return text, []
