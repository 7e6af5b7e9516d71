# ruff: noqa: RUF001  (bars of DeepSeek)
import json

import pytest

from rft.data.tool_calls import TOOL_CALLS, ToolCall


def read(name, text):
    return TOOL_CALLS.build({"name": name}, "k")(text, {})


def block(value):
    return f"<tool_call>\n{value if isinstance(value, str) else json.dumps(value)}\n</tool_call>"


def test_blocks_of_json():
    two = block({"name": "a", "arguments": {"x": 1}}) + "\n" + block({"name": "b"})
    assert read("hermes", f"I call.\n{two}") == ("I call.", [ToolCall("a", {"x": 1}), ToolCall("b", {})])
    assert read("hermes", " plain\n") == ("plain", [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (block("{"), "the call is no JSON (Expecting property name enclosed in double quotes: line 3 column 1"),
        (block("[" * 100_000), "the call is no JSON (lists and objects are nested more than 64"),
        (block({"name": "a", "arguments": {"x": json.loads("[" * 64 + "]" * 64)}}), "the call is no JSON (lists and"),
        (block('{"name": "a", "arguments": {"x": NaN}}'), "the call is no JSON (NaN is no number)"),
        (block('{"name": "a"} b'), "the call is no JSON (Extra data: line 2 column 15"),
        (block(r'{"name": "a", "arguments": {"x": "\ud83d"}}'), "the call is no JSON (half of a surrogate pair"),
        (block([1]), 'the call is no object {"name": ..., "arguments": {...}}'),
        (block({"name": 3}), "the call is no object"),
        (block({"name": "a", "arguments": "x"}), "the arguments of the call are no object"),
        ("so <tool_call>{", "a <tool_call> is not closed"),
    ],
)
def test_a_call_that_cannot_be_read_is_its_error(text, message):
    content, [found] = read("hermes", text)
    assert isinstance(found, str) and found.startswith(message) and content in ("", "so")


def test_62_levels_below_the_arguments_are_read():
    deep = json.loads("[" * 62 + "]" * 62)
    assert read("hermes", block({"name": "a", "arguments": {"x": deep}})) == ("", [ToolCall("a", {"x": deep})])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"}]', [ToolCall("f", {})]),
        ('[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"x": 1}', [ToolCall("f", {"x": 1})]),
        ('[TOOL_CALLS]f {"x": 1}', [ToolCall("f", {"x": 1})]),
        ('[TOOL_CALLS]{"name": "f"}', [ToolCall("f", {})]),
        ("[TOOL_CALLS]f[ARGS]", ["the call is no JSON (Expecting value"]),
        ("[TOOL_CALLS]", ["the call is no JSON (Expecting value"]),
        ("[TOOL_CALLS]f[ARGS][]", ["the arguments of the call are no object"]),
        ('[TOOL_CALLS]g[ARGS]{}[TOOL_CALLS]f[ARGS]{"x": y}', [ToolCall("g", {}), "the call is no JSON (Expecting"]),
        ('[TOOL_CALLS]f[ARGS]{"x": y}[TOOL_CALLS]g[ARGS]{}', ["the call is no JSON (Expecting"]),
        ("[TOOL_CALLS]f[ARGS]{} and more", [ToolCall("f", {}), "behind a call stands a text that is no call"]),
        (
            "[TOOL_CALLS]f[ARGS]{} [THINK][TOOL_CALLS]g[ARGS]{}[/THINK]",
            [ToolCall("f", {}), "behind a call stands a text that is no call"],
        ),
    ],
)
def test_calls_of_mistral(text, calls):
    content, found = read("mistral", f"So {text}")
    assert content == "So" and len(found) == len(calls)
    for one, expected in zip(found, calls, strict=True):
        assert one.startswith(expected) if isinstance(expected, str) else one == expected


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("function<｜tool▁sep｜>f\n```json\n{\"x\": \"```json\"}\n```", ToolCall("f", {"x": "```json"})),
        ("function<｜tool▁sep｜>{}", ToolCall("function", {})),
        ("f<｜tool▁sep｜>{} {}", "the arguments of f are no JSON (Extra data: line 1 column 4"),
        ("f<｜tool▁sep｜>[]", "the arguments of the call are no object"),
        ("f{}", "a call has no <｜tool▁sep｜>"),
    ],
)  # fmt: skip
def test_calls_of_deepseek(call, found):
    text = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    content, [one] = read("deepseek", text)
    assert not content and (one.startswith(found) if isinstance(found, str) else one == found)


def test_calls_of_kimi():
    section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|> so"
    call = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert read("kimi_k2", section.format(call.format("a.b:12"))) == ("so", [ToolCall("a.b", {})])
    assert read("kimi_k2", section.format(call.format("f"))) == (
        "so", ["the id of the call is 'f', not functions.name:number"]
    )  # fmt: skip
    assert read("kimi_k2", section.format("")) == ("so", ["a section has no call"])
    assert read("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>") == (
        "", ["a <|tool_call_begin|> is not closed"]
    )  # fmt: skip
    assert read("kimi_k2", section.format(f"hm {call.format('f:0')}")) == (
        "so", [ToolCall("f", {}), "a section of calls has a text that is no call"]
    )  # fmt: skip
