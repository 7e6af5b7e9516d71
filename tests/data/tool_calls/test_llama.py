import pytest

from rft.data.tool_calls import TOOL_CALLS, ToolCall

TOOLS = {"f": {"type": "function", "function": {"name": "f"}}}


def read(name, text):
    return TOOL_CALLS.build({"name": name}, "k")(text, TOOLS)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (' <|python_tag|> {"name": "g", "parameters": {"x": 1}}\n', [ToolCall("g", {"x": 1})]),
        ('{"type": "function", "name": "g", "arguments": {}};{"name": "f"};', [ToolCall("g", {}), ToolCall("f", {})]),
        ('{"name": "f"}', [ToolCall("f", {})]),
        ('{"name": "f", "parameters": []}', ["the arguments of the call are no object"]),
        ('{"name": "g", "parameters": {}} so', [ToolCall("g", {}), "behind a call stands a text that is no call"]),
        ('{"name": "g", "parameters": {}}; so', [ToolCall("g", {}), "the call is no JSON (Expecting value"]),
        ('{"name": "g", "parameters": {}}; 3', [ToolCall("g", {}), 'the call is no object {"name": ..., "parameters"']),
    ],
)
def test_an_answer_that_is_calls(text, calls):
    content, found = read("llama_json", text)
    assert content == "" and len(found) == len(calls)
    for one, expected in zip(found, calls, strict=True):
        assert one.startswith(expected) if isinstance(expected, str) else one == expected


@pytest.mark.parametrize("text", ['{"name": "Ann", "age": 3}', "{x} is a set", '{"a": {"name": "f"}}', "[1]", "plain"])
def test_an_answer_that_is_no_call(text):
    assert read("llama_json", f" {text}\n") == (text, [])


@pytest.mark.parametrize(
    ("code", "calls"),
    [
        (
            'f.call(query="a")\ng.call(x=[-1, {"a": null}])',
            [ToolCall("f", {"query": "a"}), ToolCall("g", {"x": [-1, {"a": None}]})],
        ),
        ("f.call('a')", ["behind <|python_tag|> stands no call name.call(argument=...)"]),
        ("f.call(**x)", ["the arguments of f.call are no literals with names (** in front of one)"]),
        ("f.call(x=open('a'))", ["the arguments of f.call are no literals with names (a value is a Call)"]),
        ("f.call(x={1})", ["the arguments of f.call are no literals with names (a value is a Set)"]),
        ("f.call(x={1: 2})", ["the arguments of f.call are no literals with names (the keys of a dict are no texts)"]),
        ("f.call(x=b'a')", ["the arguments of f.call are no literals with names (a value is a Constant)"]),
        ("f.call(x=1e999)", ["the arguments of f.call are no literals with names (Infinity is no number)"]),
        ("f.call(x=" + "[" * 70 + "]" * 70 + ")", ["the arguments of f.call are no literals with names (lists"]),
        ("f.call(x=" + "[" * 300 + "]" * 300 + ")", ["the call is no Python (too many nested parentheses"]),
        ("f.call(x=" + "-" * 100_000 + "1)", ["the call is no Python ("]),
        ("f.call(x='\0')", ["the call is no Python ("]),
        ("print(1)", ["behind <|python_tag|> stands no call name.call(argument=...)"]),
        ("", ["behind <|python_tag|> stands no call"]),
    ],
)
def test_calls_in_python(code, calls):
    content, found = read("llama_python", f"So <|python_tag|>{code}")
    assert content == "So" and len(found) == len(calls)
    for one, expected in zip(found, calls, strict=True):
        assert one.startswith(expected) if isinstance(expected, str) else one == expected


def test_python_without_its_tag_is_content():
    assert read("llama_python", 'f.call(query="a")') == ('f.call(query="a")', [])
