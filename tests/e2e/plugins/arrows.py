from collections.abc import Mapping

from rft.data.tool_calls import TOOL_CALLS, Found, Schema, ToolCall


@TOOL_CALLS.register("arrow", marks=("->",), openings=("->",))
def arrow(text: str, tools: Mapping[str, Schema]) -> Found:
    """An answer that ends with `-> name text` is a call."""
    content, called, call = text.partition("->")
    name, _, argument = call.strip().partition(" ")
    if not called:
        return text, []
    return content.strip(), [ToolCall(name, {"text": argument}) if name else "no name stands behind ->"]
