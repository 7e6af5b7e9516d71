from rft.data.tool_calls import ToolCall, assistant_message, decoded


def test_the_message_of_an_answer():
    assert assistant_message("a", []) == {"role": "assistant", "content": "a"}
    found = assistant_message("a", [ToolCall("f", {"x": 1}), "broken"])
    assert found["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def call(arguments):
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_arguments_that_are_the_json_text_of_an_object_become_the_object():
    kept = ["[1]", "{", '"x"', {"x": 1}, None]
    message = {"role": "assistant", "content": "a", "tool_calls": [call('{"x": [1]}'), *map(call, kept)]}
    before = repr(message)
    assert decoded(message) == message | {"tool_calls": [call({"x": [1]}), *map(call, kept)]}
    assert repr(message) == before, "the message itself is left as it is"
    assert decoded({"tool_calls": [{"name": "f", "arguments": "{}"}]})["tool_calls"] == [{"name": "f", "arguments": {}}]
    for plain in ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a", "tool_calls": None}):
        assert decoded(plain) == plain
