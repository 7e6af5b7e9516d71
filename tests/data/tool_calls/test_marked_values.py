import pytest

from rft.data.tool_calls.marked import argument_value, parameter_kinds, properties


def kinds(*names):
    return frozenset(names)


@pytest.mark.parametrize(
    ("text", "allowed", "value"),
    [
        ("3", kinds("string"), "3"),
        ("3", kinds("integer"), 3),
        (" 3\n", kinds("number"), 3),
        ("true", kinds("boolean"), True),
        (" True\n", kinds("boolean"), True),
        ("None", kinds("integer", "null"), None),
        ("null", kinds("null"), None),
        ('{"a": [1.5]}', kinds("object"), {"a": [1.5]}),
        ('"3"', kinds("integer"), "3"),  # JSON of another type: the tool refuses it
        ("3", kinds("string", "integer"), 3),
        ("x", kinds("string", "integer"), "x"),
        ('{"a": 1}', kinds("string", "integer"), '{"a": 1}'),
        ('"x"', kinds("string", "null"), "x"),
        ("null", kinds("string", "null"), None),
        ("None", kinds("string", "null"), "None"),
        ("true", kinds("string", "number"), "true"),
        ("1e999", None, "1e999"),
        ("[" * 100_000, None, "[" * 100_000),
        ("9" * 5_000, None, "9" * 5_000),
        ("3", None, 3),
        ("x", None, "x"),
    ],
)
def test_the_value_of_a_text(text, allowed, value):
    found = argument_value(text, allowed)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"type": "string"}, kinds("string")),
        ({"type": ["string", "null"]}, kinds("string", "null")),
        ({"type": "string", "nullable": True}, kinds("string", "null")),
        (
            {"anyOf": [{"type": "array"}, {"oneOf": [{"type": "null"}]}, {"const": 0}]},
            kinds("array", "null", "integer", "number"),
        ),
        ({"anyOf": [{"type": "integer"}, {}]}, None),
        ({"enum": ["a", "b"]}, kinds("string")),
        ({"enum": [1, None]}, kinds("integer", "number", "null")),
        ({"$ref": "#/$defs/Color"}, kinds("string")),
        ({"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}, kinds("string")),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "#/$defs/Absent"}, None),
        ({"$ref": "https://example.org/a"}, None),
        ({}, None),
        (True, None),
        ({"type": 3}, None),
    ],
)  # fmt: skip
def test_the_types_that_a_schema_allows(schema, allowed):
    parameters = {
        "properties": {"x": schema},
        "$defs": {"Color": {"enum": ["red", "blue"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}]}},
    }
    tools = {"f": {"type": "function", "function": {"name": "f", "parameters": parameters}}}
    assert parameter_kinds(tools, "f", "x") == allowed
    assert parameter_kinds(tools, "f", "y") is None and parameter_kinds(tools, "g", "x") is None


def test_tools_without_parameters_have_no_properties():
    for function in ({"name": "f"}, {"name": "f", "parameters": None}, {"name": "f", "parameters": {"type": "object"}}):
        assert properties({"f": {"type": "function", "function": function}}, "f") == {}
