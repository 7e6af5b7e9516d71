import pytest

from rft.data.tool_calls import TOOL_CALLS, ToolCall
from tests.data.tool_calls.table import schema, untyped

KINDS = {"text": {"type": "string"}, "whole": {"type": "integer"}, "flag": {"type": "boolean"}, "some": {}}
TOOLS = {"f": schema("f", KINDS)}


def read(name, text):
    content, [found] = TOOL_CALLS.build({"name": name}, "k")(text, TOOLS)
    assert content == ""
    return found


def qwen(body):
    return read("qwen_xml", f"<tool_call>\n<function=f>\n{body}\n</function>\n</tool_call>")


def glm(body):
    return read("glm", f"<tool_call>f\n{body}\n</tool_call>")


@pytest.mark.parametrize(
    ("text", "value"),
    [("\n a\n\n", " a\n"), ("a", "a"), ("\n\n", ""), ("\n", ""), ("", ""), ("\n12\n", "12"), ("\nnull\n", "null")],
)
def test_one_line_break_on_each_side_of_a_value_is_no_part_of_it(text, value):
    assert qwen(f"<parameter=text>{text}</parameter>") == ToolCall("f", {"text": value})


def test_a_value_may_quote_tags():
    for text in ("</parameter> b", "a</parameter></b>", "<parameter=text>", "</function>", "<tool_call>", "<think>"):
        assert qwen(f"<parameter=text>\n{text}\n</parameter>\n<parameter=whole>\n1\n</parameter>") == ToolCall(
            "f", {"text": text, "whole": 1}
        )
    for text in ("</arg_value> b", "a</arg_key>", "<arg_key>", "<tool_call>", " a ", "\n"):
        assert glm(
            f"<arg_key>text</arg_key>\n<arg_value>{text}</arg_value><arg_key>whole</arg_key><arg_value>1</arg_value>"
        ) == ToolCall("f", {"text": text, "whole": 1})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("<parameter=text>\na", "an argument of f is no <parameter=key>value</parameter>: '<parameter=text>\\na'"),
        ("<parameter=text>\na\n</parameter> b", "an argument of f is no <parameter"),
        ("<parameter=text>\na</tool_call>\n</parameter>", "the call is no <function=name> ... </function>"),
        ("text=a", "an argument of f is no <parameter=key>value</parameter>: 'text=a'"),
        (
            "<parameter=whole>\n1.\n</parameter>",
            "the argument whole of f is no JSON of type integer: Extra data: line 1",
        ),
        ("<parameter=whole>\n\n</parameter>", "the argument whole of f is no JSON of type integer: Expecting value"),
        ("<parameter=flag>\nyes\n</parameter>", "the argument flag of f is no JSON of type boolean: Expecting value"),
    ],
)
def test_a_parameter_that_cannot_be_read_is_a_reason_and_no_half_of_a_call(body, reason):
    text = f"<tool_call>\n<function=f>\n{body}\n</function>\n</tool_call>"
    [found] = TOOL_CALLS.build({"name": "qwen_xml"}, "k")(text, TOOLS)[1]
    assert isinstance(found, str) and found.startswith(reason)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("<arg_key>text</arg_key>\n<arg_value>a", "an argument of f is no <arg_key>key</arg_key><arg_value>value<"),
        ("<arg_key>text</arg_key>\na", "an argument of f is no <arg_key>"),
        ("<arg_value>a</arg_value>", "the call is no name<arg_key>key</arg_key><arg_value>value</arg_value>"),
        ("<arg_key>flag</arg_key><arg_value>1,</arg_value>", "the argument flag of f is no JSON of type boolean"),
    ],
)
def test_an_argument_of_glm_that_cannot_be_read(body, reason):
    found = glm(body)
    assert isinstance(found, str) and found.startswith(reason)


def test_blanks_around_a_name_are_no_part_of_it():
    assert qwen("<parameter= whole >\n1\n</parameter>") == ToolCall("f", {"whole": 1})
    assert glm("<arg_key> whole </arg_key> <arg_value>1</arg_value>") == ToolCall("f", {"whole": 1})


def test_calls_of_another_format_are_reasons():
    for name in ("qwen_xml", "glm"):
        for block in ('{"name": "f"}', "", "<function=f>" if name == "qwen_xml" else "<function=f>\n</function>"):
            assert isinstance(read(name, f"<tool_call>{block}</tool_call>"), str)


def test_a_parameter_that_the_tool_does_not_state_is_json_or_the_text():
    for text, value in (("[1]", [1]), ("a b", "a b"), ("True", "True"), ("NaN", "NaN")):
        for key in ("some", "unknown"):
            assert qwen(f"<parameter={key}>\n{text}\n</parameter>") == ToolCall("f", {key: value})
            assert glm(f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>") == ToolCall("f", {key: value})


@pytest.mark.parametrize("form", ["qwen_xml", "glm"])
def test_the_schema_gives_the_type_of_a_value(form):
    for name, tools, text, value in untyped(form):
        [call] = TOOL_CALLS.build({"name": form}, "k")(text, tools)[1]
        found = call if isinstance(call, str) else call.arguments["x"]
        assert isinstance(call, str) if value is str else (type(found), found) == (type(value), value), name
