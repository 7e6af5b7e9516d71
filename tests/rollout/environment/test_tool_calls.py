import json

import pytest

from rft.rollout.environment.tool_calls import TOOL_CALLS, ToolCall, assistant_message

ONE = {"function": {"name": "calculate", "parameters": {"properties": {"expression": {}, "digits": {}}}}}
NONE = {"function": {"name": "look", "parameters": {"properties": {}}}}


def hermes(text):
    return TOOL_CALLS.build({"name": "hermes"}, "k")(text, {})


def block(value):
    return f"<tool_call>\n{value if isinstance(value, str) else json.dumps(value)}\n</tool_call>"


def test_blocks_of_json():
    two = block({"name": "a", "arguments": {"x": 1}}) + "\n" + block({"name": "b"})
    assert hermes(f"I call.\n{two}") == ("I call.", [ToolCall("a", {"x": 1}), ToolCall("b", {})])
    assert hermes("plain") == ("plain", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (block("{"), "the call is no JSON"),
        (block("[" * 100_000), "the call is no JSON"),
        (block([1]), "the call is no object"),
        (block({"name": 3}), "the call is no object"),
        (block({"name": "a", "arguments": "x"}), "the arguments of the call are no object"),
        ("so <tool_call>{", "a <tool_call> is not closed"),
    ],
)
def test_a_call_that_cannot_be_read_is_its_error(text, message):
    content, [found] = hermes(text)
    assert isinstance(found, str) and found.startswith(message) and content in ("", "so")


def test_marks():
    marks = TOOL_CALLS.build({"name": "mark", "marks": {"?": "calculate", "!": "look", "#": "none"}}, "k")
    tools = {"calculate": ONE, "look": NONE}
    assert marks("?3*4", tools) == ("?3*4", [ToolCall("calculate", {"expression": "3*4"})])
    assert marks("!", tools) == ("!", [ToolCall("look", {})]) and marks("12", tools) == ("12", [])
    assert marks("#5", tools) == ("#5", [ToolCall("none", {})]), "the environment says that there is no such tool"
    assert not marks.facts.described and TOOL_CALLS.build({"name": "hermes"}, "k").facts.described


def test_the_message_of_an_answer():
    assert assistant_message("a", []) == {"role": "assistant", "content": "a"}
    found = assistant_message("a", [ToolCall("f", {"x": 1}), "broken"])
    assert found["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
