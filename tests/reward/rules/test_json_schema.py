"""Which responses are JSON, which values a schema accepts, and which schemas are refused."""

import json

import pytest

from rft.registry import Plugin
from rft.reward import REWARDS
from rft.reward.term import Unscored

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
LISTS = {"$ref": "#/$defs/lists", "$defs": {"lists": {"type": "array", "items": {"$ref": "#/$defs/lists"}}}}


def rule(**options: object) -> Plugin:
    node = {"name": "json", "tag": None, "fence": "optional", "schema": None, "schema_field": None}
    return REWARDS.build(node | options, "reward.terms.json")


@pytest.mark.parametrize(
    "text", ['{"a": 1}', " [1, 2.5e3, null]\n", '"text"', "true", "-0.5", '{"a": {"a": 1}}', "[" * 64 + "]" * 64]
)
def test_json(text: str) -> None:
    assert rule()(text, {}) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a: 1",
        "{'a': 1}",
        '{"a": 1,}',
        '{"a": 1} so',
        "{}{}",
        '{"a": 1, "b": 2, "a": 3}',
        '[{"b": {"a": 1, "a": 1}}]',
        "NaN",
        '{"a": Infinity}',
        "[-Infinity]",
        "1e999",
        "9" * 5000,
        "[" * 65 + "]" * 65,
        "[" * 100_000,
        r'"\ud800"',
        '"a\nb"',
        "\ufeff{}",
        "\u00a0{}",
    ],
)
def test_not_json(text: str) -> None:
    assert rule()(text, {}) == 0.0
    assert rule().call("extract", text) is None


# (response, its value for each fence)
FENCES = [
    ("[1]", {"never": 1.0, "optional": 1.0, "required": 0.0}),
    ("So:\n```json\n[1]\n```\n", {"never": 0.0, "optional": 1.0, "required": 1.0}),
    ("```\n[1]\n```", {"never": 0.0, "optional": 1.0, "required": 1.0}),
    ("```\n[1\n```\nor\n```\n[1]\n```", {"never": 0.0, "optional": 1.0, "required": 1.0}),
    ("```\n[1]\n```\nor\n```\n[1\n```", {"never": 0.0, "optional": 0.0, "required": 0.0}),
    ("```json\n[1]", {"never": 0.0, "optional": 0.0, "required": 0.0}),
    ('```\n["```"]\n```', {"never": 0.0, "optional": 1.0, "required": 1.0}),
    ("", {"never": 0.0, "optional": 0.0, "required": 0.0}),
]


@pytest.mark.parametrize(("response", "values"), FENCES)
@pytest.mark.parametrize("fence", ["never", "optional", "required"])
def test_fenced_blocks(response: str, values: dict[str, float], fence: str) -> None:
    assert rule(fence=fence)(response, {}) == values[fence]


def test_the_text_of_a_tag_alone() -> None:
    check = rule(tag="answer")
    assert check("so <answer>[1]</answer>", {}) == 1.0
    assert check("<answer>\n```json\n[1]\n```\n</answer>", {}) == 1.0
    assert check("```\n[1]\n```\n<answer>one</answer>", {}) == 0.0
    assert check("[1]", {}) == 0.0


@pytest.mark.parametrize(
    ("value", "score"),
    [
        ({"name": "Ada", "age": 36}, 1.0),
        ({"name": "Ada"}, 1.0),
        ({"name": "Ada", "age": 36.0}, 1.0),  # 36.0 is an integer in JSON Schema
        ({"name": "Ada", "age": True}, 0.0),
        ({"name": "Ada", "age": -1}, 0.0),
        ({"age": 36}, 0.0),
        ({"name": "Ada", "born": 1815}, 0.0),
        (["Ada"], 0.0),
    ],
)
def test_a_schema_of_the_yaml_and_of_the_row(value: object, score: float) -> None:
    text = json.dumps(value)
    assert rule(schema=PERSON)(text, {}) == score
    of_row = rule(schema_field="form")
    assert of_row.facts.reads == ("form",) and rule(schema=PERSON).facts.reads == ()
    for form in (PERSON, json.dumps(PERSON)):
        of_row.call("gold", {"form": form})
        assert of_row(text, {"form": form}) == score


def test_the_dialect_is_the_one_that_the_schema_names() -> None:
    pair = {"items": [{"type": "string"}, {"type": "number"}]}  # a list of schemas only until draft 2019-09
    draft7 = pair | {"$schema": "http://json-schema.org/draft-07/schema#"}
    assert rule(schema=draft7)('["a", 1]', {}) == 1.0
    assert rule(schema=draft7)('["a", "b"]', {}) == 0.0
    with pytest.raises(ValueError, match=r"^reward\.terms\.json\.schema is no JSON schema: "):
        rule(schema=pair)


FAULTS = [
    ({"type": "strng"}, r"'strng' is not valid under any of the given schemas \(at \$\.type\)"),
    ({"properties": {"a": {"minimum": "0"}}}, r"'0' is not of type 'number' \(at \$\.properties\.a\.minimum\)"),
    ({"type": "object", "required": None}, r"None is not of type 'array' \(at \$\.required\)"),
    ({"pattern": "("}, r"'\(' is not a 'regex'"),
    ({"$ref": "#/$defs/none"}, r"the reference '#/\$defs/none' leads nowhere; write its target into \$defs"),
    ({"items": {"anyOf": [{"$ref": "http://127.0.0.1:9/a.json"}]}}, r"the reference 'http://127.0.0.1:9/a.json' leads"),
    ({"$ref": "#"}, "it refers to itself without end"),
    ({"$schema": "http://a/b"}, r"\$schema='http://a/b' is no known dialect; leave it out"),
    ({"$schema": ["a"]}, r"\$schema=\['a'\] is no known dialect"),
]


@pytest.mark.parametrize(("schema", "message"), FAULTS)
def test_a_schema_with_a_fault_is_refused_before_a_run(schema: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^reward\.terms\.json\.schema is no JSON schema: {message}"):
        rule(schema=schema)
    for form in (schema, json.dumps(schema)):
        with pytest.raises(ValueError, match=f"the field 'form' is no JSON schema: {message}"):
            rule(schema_field="form").call("gold", {"form": form})


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("{", r"the field 'form' is not JSON \(.*\): '\{'; correct or remove the row"),
        ("true", "the field 'form' is no JSON schema: a JSON schema is an object, not bool"),
        ([PERSON], "the field 'form' is no JSON schema: a JSON schema is an object, not list"),
    ],
)
def test_a_field_without_a_schema(form: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule(schema_field="form").call("gold", {"form": form})


def test_without_a_schema_any_row_will_do() -> None:
    rule().call("gold", {})
    rule(schema=PERSON).call("gold", {})


def test_references_within_a_schema_are_followed() -> None:
    assert rule(schema=LISTS)("[[], [[]]]", {}) == 1.0
    assert rule(schema=LISTS)("[[], [1]]", {}) == 0.0
    number = {"$id": "http://a/number", "$ref": "#/$defs/whole", "$defs": {"whole": {"type": "integer"}}}
    by_id = {"items": {"$ref": "http://a/number"}, "$defs": {"number": number}}  # the inner "#" is that of its $id
    assert rule(schema=by_id)("[1, 2]", {}) == 1.0
    assert rule(schema=by_id)("[1, 2.5]", {}) == 0.0


def test_what_cannot_be_followed_to_its_end_has_no_score() -> None:
    nested: dict = {"$ref": "#/$defs/lists"}
    for _ in range(30):
        nested = {"allOf": [nested]}
    schema = {"$ref": "#/$defs/lists", "$defs": {"lists": {"type": "array", "items": nested}}}
    assert rule(schema=schema)("[[]]", {}) == 1.0
    value = rule(schema=schema)("[" * 64 + "]" * 64, {})
    assert value == Unscored("the json schema refers to itself more often than can be followed")


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ('{"a": 1, "b": 2}', '{"b":2,"a":1.0}', True),
        ("[1, 2]", "[2, 1]", False),
        ("1", "true", False),
        ('"1"', "1", False),
        ("-0.0", "0", True),
        ('"\\u00e9"', '"é"', True),
    ],
)
def test_what_is_extracted_is_equal_where_the_values_are(left: str, right: str, equal: bool) -> None:
    assert (rule().call("extract", left) == rule().call("extract", right)) == equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema": PERSON, "schema_field": "form"}, "schema_field=form: there is also a schema; set one of"),
        ({"tag": "<a>"}, "tag: '<a>' is no name of a tag"),
        ({"fence": "maybe"}, "fence: expected one of never, optional, required"),
    ],
)
def test_options_that_do_not_fit(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^reward\.terms\.json\.{message}"):
        rule(**options)


@pytest.mark.parametrize(("options", "key"), [({"schema": PERSON}, "schema"), ({"schema_field": "f"}, "schema_field")])
def test_without_the_package_there_is_no_schema(options: dict, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rule()
    with pytest.raises(ValueError, match=rf"^reward\.terms\.json\.{key} needs the package jsonschema; pip install"):
        rule(**options)
