"""Which calls a response makes, and how many of them are those of the row."""

import json

import pytest

from rft.batch.row_fields import EPISODE_FIELD
from rft.data.tool_calls import TOOL_CALLS, ToolCall
from rft.registry import Plugin
from rft.reward import REWARDS
from rft.reward.rules.tool_calls import calls_in
from rft.reward.term import Unscored
from tests.data.tool_calls.table import FORMS, NONE, TOOLS, Arguments, Form
from tests.helpers import yaml_options
from tests.reward.reward_of import reward_of, score_of

RAIN = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
TIME = {"name": "time", "arguments": {}}
SUM = {"name": "sum", "arguments": {"terms": [1, 2]}}


def hermes(*calls: object) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def rule(**options: object) -> Plugin:
    node = {"name": "tool_call", "field": "answer", "format": "hermes", "ordered": False, "score": "all"}
    return REWARDS.build(node | options, "reward.terms.calls")


def valid(**options: object) -> Plugin:
    node = {"name": "tool_call_valid", "field": "tools", "format": "hermes", "score": "all"}
    return REWARDS.build(node | options, "reward.terms.valid")


# (calls of the row, calls of the response, {(ordered, score): value})
VALUES = [
    ([RAIN], [RAIN], 1.0, 1.0, 1.0, 1.0),
    ([RAIN, TIME], [RAIN, TIME], 1.0, 1.0, 1.0, 1.0),
    ([RAIN, TIME], [TIME, RAIN], 1.0, 1.0, 0.0, 1 / 2),
    ([RAIN, TIME, SUM], [TIME, SUM, RAIN], 1.0, 1.0, 0.0, 2 / 3),  # in order: TIME, SUM
    ([RAIN, TIME], [TIME], 0.0, 1 / 2, 0.0, 1 / 2),
    ([RAIN], [TIME, RAIN, SUM], 0.0, 1 / 3, 0.0, 1 / 3),
    ([RAIN], [RAIN, RAIN], 0.0, 1 / 2, 0.0, 1 / 2),  # an expected call counts once
    ([RAIN, RAIN], [RAIN], 0.0, 1 / 2, 0.0, 1 / 2),
    ([RAIN], [], 0.0, 0.0, 0.0, 0.0),
    ([], [], 1.0, 1.0, 1.0, 1.0),
    ([], [RAIN], 0.0, 0.0, 0.0, 0.0),
    ([RAIN], [{"name": "weather", "arguments": {"days": 2.0, "city": "Paris"}}], 1.0, 1.0, 1.0, 1.0),
    ([RAIN], [{"name": "weather", "arguments": {"city": "Paris", "days": "2"}}], 0.0, 0.0, 0.0, 0.0),
    ([RAIN], [{"name": "weather", "arguments": {"city": "Paris"}}], 0.0, 0.0, 0.0, 0.0),
    ([RAIN], [RAIN | {"arguments": "Paris"}], 0.0, 0.0, 0.0, 0.0),
    ([SUM], [{"name": "sum", "arguments": {"terms": [2, 1]}}], 0.0, 0.0, 0.0, 0.0),
    ([RAIN, TIME], [RAIN, {"arguments": {}}], 0.0, 0.0, 0.0, 0.0),  # of a call that cannot be read no other counts
]


@pytest.mark.parametrize(("expected", "made", "whole", "share", "in_order", "share_in_order"), VALUES)
def test_values(expected, made, whole, share, in_order, share_in_order) -> None:
    found = {
        (False, "all"): whole, (False, "share"): share, (True, "all"): in_order, (True, "share"): share_in_order
    }  # fmt: skip
    for (ordered, score), value in found.items():
        for row in ({"answer": expected}, {"answer": json.dumps(expected)}):
            assert rule(ordered=ordered, score=score)(hermes(*made), row) == pytest.approx(value, abs=1e-12)
            listed = rule(ordered=ordered, score=score, format="list")
            assert listed(json.dumps(made), row) == pytest.approx(value, abs=1e-12)
            assert listed(f"So:\n```json\n{json.dumps(made)}\n```", row) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    "response",
    [
        "<tool_call>" + json.dumps(RAIN),
        json.dumps(RAIN) + "</tool_call>",
        f"<tool_call><tool_call>{json.dumps(RAIN)}</tool_call></tool_call>",
        f"{hermes(RAIN)}<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>weather(Paris)</tool_call>",
        f"<tool_call>{json.dumps([RAIN])}</tool_call>",
        f"{hermes(RAIN)}</tool_call>",
    ],
)
def test_calls_that_cannot_be_read(response: str) -> None:
    for score in ("all", "share"):
        assert rule(score=score)(response, {"answer": [RAIN]}) == 0.0
        assert rule(score=score)(response, {"answer": []}) == 0.0
        assert valid(score=score)(response, {"tools": [{"name": "weather"}]}) == 0.0


def test_what_a_call_may_have_and_lack() -> None:
    """In `hermes` as the environments read it; the list takes the two keys alone."""
    for made, expected in (({"name": "time"}, TIME), (RAIN | {"id": 1}, RAIN)):
        assert rule()(hermes(made), {"answer": [expected]}) == 1.0
        assert rule(format="list")(json.dumps([made]), {"answer": [expected]}) == 0.0
    twice = '[{"name": "sum", "name": "time", "arguments": {}}]'
    assert rule(format="list")(twice, {"answer": [TIME]}) == 0.0


def test_text_around_the_calls_does_not_count() -> None:
    response = f"<think>It may rain.</think>\n{hermes(RAIN)} and {hermes(TIME)}"
    assert rule()(response, {"answer": [TIME, RAIN]}) == 1.0
    assert rule(format="list")(response, {"answer": [TIME, RAIN]}) == 0.0


def test_a_single_object_is_a_list_of_one() -> None:
    assert calls_in(json.dumps(RAIN), "list", {}) == [ToolCall(**RAIN)]
    assert rule()(hermes(RAIN), {"answer": RAIN}) == 1.0
    assert calls_in("7", "list", {}) is None and calls_in("No.", "list", {}) is None


def test_rows_in_the_format_of_openai() -> None:
    row = {"calls": [{"id": "1", "type": "function", "function": RAIN | {"arguments": json.dumps(RAIN["arguments"])}}]}
    check = rule(field="calls")
    assert check.facts.reads == ("calls",)
    check.call("gold", row)
    assert check(hermes(RAIN), row) == 1.0
    assert check(hermes(TIME), row) == 0.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("weather", r"the field 'answer' is not JSON"),
        ("7", r"the field 'answer' has what is no call: 7; write a list of"),
        ([{"name": "time"}], r"the field 'answer' has what is no call: \{'name': 'time'\}"),
        ([{"name": "time", "arguments": ["a"]}], r"the field 'answer' has what is no call"),
        ([{"name": "time", "arguments": "{"}], r"the field 'arguments' is not JSON"),
        (None, r"the field 'answer' has what is no call: None"),
    ],
)
def test_rows_without_calls(answer: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule().call("gold", {"answer": answer})


def test_what_is_extracted_is_equal_where_the_calls_are() -> None:
    def found(*calls: object, **options: object) -> object:
        return rule(**options).call("extract", hermes(*calls))

    turned = {"arguments": {"days": 2.0, "city": "Paris"}, "name": "weather"}
    assert found(RAIN) == found(turned) != found(TIME)
    assert found(RAIN, TIME) == found(TIME, RAIN)
    assert found(RAIN, TIME, ordered=True) != found(TIME, RAIN, ordered=True)
    assert found(RAIN, {"arguments": {}}) is None
    assert rule().call("extract", "<tool_call>") is None
    assert rule().call("extract", "It rains.") == "[]"


SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"name": "time"},
]


@pytest.mark.parametrize(
    ("calls", "whole", "share"),
    [
        ([RAIN], 1.0, 1.0),
        ([RAIN, TIME], 1.0, 1.0),
        ([{"name": "weather", "arguments": {"city": "Rome"}}], 1.0, 1.0),
        ([RAIN, {"name": "weather", "arguments": {"days": 2}}], 0.0, 1 / 2),
        ([RAIN, TIME, {"name": "weather", "arguments": {"city": "Rome", "unit": "C"}}], 0.0, 2 / 3),
        ([{"name": "time", "arguments": {"zone": "CET"}}], 0.0, 0.0),  # a tool without parameters
        ([SUM, RAIN], 0.0, 1 / 2),
        ([{"arguments": {}}, TIME], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_valid_calls(calls: list, whole: float, share: float) -> None:
    for row in ({"tools": SCHEMAS}, {"tools": json.dumps(SCHEMAS)}):
        valid().call("gold", row)
        assert valid()(hermes(*calls), row) == whole
        assert valid(score="share")(hermes(*calls), row) == pytest.approx(share, abs=1e-12)
        assert valid(format="list")(json.dumps(calls), row) == whole


def test_arguments_that_a_schema_cannot_follow_have_no_score() -> None:
    nested: dict = {"$ref": "#/$defs/lists"}
    for _ in range(30):
        nested = {"allOf": [nested]}
    lists = {"properties": {"a": {"$ref": "#/$defs/lists"}}, "$defs": {"lists": {"items": nested}}}
    deep: list = []
    for _ in range(60):
        deep = [deep]
    row = {"tools": [{"name": "f", "parameters": lists}]}
    assert valid()(hermes({"name": "f", "arguments": {"a": [[]]}}), row) == 1.0
    assert isinstance(valid()(hermes({"name": "f", "arguments": {"a": deep}}), row), Unscored)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], r"the field 'tools' is no list of tools: \[\]"),
        ({"name": "time"}, r"the field 'tools' is no list of tools"),
        ([{"parameters": {}}], r"the field 'tools' is no list of tools"),
        ("[", r"the field 'tools' is not JSON"),
        ([{"name": "f", "parameters": {"type": "text"}}], r"the parameters of 'f' are no JSON schema: 'text' is not"),
    ],
)
def test_rows_without_tools(tools: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        valid().call("gold", {"tools": tools})


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("hermse", r"format: no format of tool calls is called 'hermse'; did you mean hermes\?; choose one of: list, "),
        ({"name": "tag"}, r"format: no format of tool calls is called 'tag'; choose one of: list, .*, qwen_xml$"),
        ({"marks": {}}, r"format: no format of tool calls is called 'None'; choose one of: list, "),
        ({"name": "list", "tag": "a"}, r"format: list takes no options; write format: list$"),
        ("mark", r"format\.marks is missing: "),
        ({"name": "mark", "marks": 1}, r"format\.marks: expected dict"),
        ({"name": "glm", "a": 1, "b": 2}, r"format\.a: .* takes no options; format\.b: "),
        (None, r"format: expected text or dict"),
    ],
)
def test_formats_that_do_not_fit(format: object, message: str) -> None:
    for build, name in ((rule, "calls"), (valid, "valid")):
        with pytest.raises(ValueError, match=rf"^reward\.terms\.{name}\.{message}"):
            build(format=format)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rule()
    with pytest.raises(ValueError, match=r"^reward\.terms\.valid\.name needs the package jsonschema; pip install"):
        valid()


def test_the_reward_of_an_episode():
    reward = REWARDS.build({"name": "environment"}, "reward.terms.environment")
    assert reward("any text", {EPISODE_FIELD: {"reward": 2.5, "failed": None}}) == 2.5
    assert isinstance(reward("any text", {EPISODE_FIELD: {"reward": None, "failed": None}}), Unscored)
    assert reward("any text", {EPISODE_FIELD: {"reward": None, "failed": "OSError: gone"}}) == 0.0


# Calls in every form. The row expects `find` of a text of digits and a number, and `look` without arguments.
def of_find(query: str, count: str) -> Arguments:
    return Arguments(f'{{"query": "{query}", "count": {count}}}', [("query", query), ("count", count)],
                     f"query='{query}', count={count}", {})  # fmt: skip


FIND, LOOK = ("find", of_find("12", "3")), ("look", NONE)
EXPECTED = [{"name": "find", "arguments": {"query": "12", "count": 3}}, {"name": "look", "arguments": {}}]
CALLS = {  # calls, and the values: all, share, and both in order
    "right": ([FIND, LOOK], 1.0, 1.0, 1.0, 1.0),
    "order": ([LOOK, FIND], 1.0, 1.0, 0.0, 1 / 2),
    "wrong text": ([("find", of_find("13", "3")), LOOK], 0.0, 1 / 2, 0.0, 1 / 2),
    "wrong number": ([("find", of_find("12", "4")), LOOK], 0.0, 1 / 2, 0.0, 1 / 2),
    "another number of the same value": ([("find", of_find("12", "3.0")), LOOK], 1.0, 1.0, 1.0, 1.0),
    "no arguments": ([("find", NONE), LOOK], 0.0, 1 / 2, 0.0, 1 / 2),
    "wrong name": ([("seek", FIND[1]), LOOK], 0.0, 1 / 2, 0.0, 1 / 2),
    "extra call": ([FIND, LOOK, FIND], 0.0, 2 / 3, 0.0, 2 / 3),
    "missing call": ([FIND], 0.0, 1 / 2, 0.0, 1 / 2),
}


def values(form: Form, response: str, expected: list) -> list[float]:
    """The values of a response: all, share, and both in order."""
    options = [{"ordered": ordered, "score": score} for ordered in (False, True) for score in ("all", "share")]
    return [score_of("tool_call", response, {"answer": expected}, format=form.format, **one) for one in options]


def thought(form: Form, text: str) -> str:
    if form.format == "harmony":
        return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"
    return f"<think>{text}</think>\n\n"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_in_every_form(name: str, form: Form) -> None:
    calls, *expected = CALLS[name]
    found = values(form, form.write(calls), EXPECTED)
    assert found == pytest.approx(expected, abs=1e-6)  # scores are float32


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_text_thoughts_and_cut_calls_in_every_form(form: Form) -> None:
    right, call = form.write([FIND, LOOK]), form.write([LOOK, FIND])
    draft = "to=functions.look {}" if form.format == "harmony" else form.write([LOOK])
    said = "<|channel|>final<|message|>No.<|return|>" if form.format == "harmony" else "No."
    assert values(form, thought(form, draft) + right, EXPECTED) == [1.0] * 4
    assert values(form, thought(form, draft) + said, EXPECTED[1:]) == [0.0] * 4
    assert values(form, thought(form, draft) + said, []) == [1.0] * 4
    assert values(form, call[: call.index("12") + 1], EXPECTED) == [0.0] * 4, "no part for the first call"
    beside = f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{right}"
    beside = beside if form.format == "harmony" else f"I look.\n{right}"
    assert values(form, beside, EXPECTED) == [0.0 if form.format == "llama_json" else 1.0] * 4


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_valid_calls_in_every_form(form: Form) -> None:
    def value(*calls: tuple[str, Arguments], score: str = "all") -> float:
        row = {"tools": list(TOOLS.values())}
        return score_of("tool_call_valid", form.write([*calls]), row, format=form.format, score=score)

    assert value(FIND, LOOK) == value(("find", NONE)) == 1.0
    assert value(FIND, ("seek", NONE)) == value(("find", of_find("12", "true"))) == 0.0
    assert value(FIND, ("seek", NONE), score="share") == 0.5


def test_every_format_is_in_the_table_but_that_with_options() -> None:
    assert {form.format for form in FORMS.values()} == {*TOOL_CALLS.names()} - {"mark"}
    marks = {"name": "mark", "marks": {"?": "f"}}
    check, row = rule(format=marks), {"answer": [{"name": "f", "arguments": {"x": "12"}}]}
    assert [check(text, row) for text in ("?12", "?13", "12")] == [1.0, 0.0, 0.0]


def test_values_without_types_have_those_of_the_expected_ones() -> None:
    """Also of an argument that two calls of the row have with different types."""
    for expected, text, score in [
        ("true", "true", 1.0), (True, "true", 1.0), (True, "True", 1.0), (None, "null", 1.0), ("null", "null", 1.0),
        ([1], "[1]", 1.0), ("[1]", "[1]", 1.0), ("[1]", "[2]", 0.0), (1, "one", 0.0), ({"a": "b"}, '{"a": "b"}', 1.0),
    ]:  # fmt: skip
        response = f"<tool_call>f<arg_key>x</arg_key><arg_value>{text}</arg_value></tool_call>"
        assert rule(format="glm")(response, {"answer": [{"name": "f", "arguments": {"x": expected}}]}) == score
    both = [{"name": "f", "arguments": {"x": value}} for value in ("a", 3)]
    response = "".join(f"<tool_call>f<arg_key>x</arg_key><arg_value>{x}</arg_value></tool_call>" for x in ("a", "3"))
    assert rule(format="glm")(response, {"answer": both}) == 1.0


def test_thoughts_and_marks_of_thoughts_between_calls() -> None:
    def score(response: str, *expected: object, **row: object) -> float:
        return score_of("tool_call", response, {"answer": list(expected), **row})

    quoted = {"name": "weather", "arguments": {"city": "<think>"}}
    closed = {"name": "weather", "arguments": {"city": "<think></think>"}}
    assert score(f"{hermes(RAIN)}<think>{hermes(SUM)}</think>{hermes(TIME)}", RAIN, TIME) == 1.0
    assert score(f"{hermes(quoted)}{hermes(closed)}", quoted, closed) == 1.0
    assert score(f"{hermes(RAIN)}<think>{hermes(SUM)}", RAIN) == 1.0, "a thought behind the calls does not end"
    assert score(f"{hermes(SUM)}</think>{hermes(TIME)}", TIME) == 1.0, "the prompt of a given response is not known"
    assert score(f"{hermes(SUM)}</think>{hermes(TIME)}", TIME, prompt_opens="<think>") == 1.0
    assert score(f"{hermes(SUM)}</think><think>{hermes(RAIN)}</think>{hermes(TIME)}", TIME) == 1.0
    assert score("No. <think>I may") == 1.0 and score("<think>I may") == 0.0


def test_a_reward_shows_the_formats_that_its_terms_read() -> None:
    """In other processes and on servers, too."""
    options = yaml_options("reward/terms/tool_call.yaml")["tool_call"]
    other = yaml_options("reward/terms/tool_call_valid.yaml")["tool_call_valid"]
    http = {"workers": "http", "deadline_s": 1.0, "http": {"addresses": ["http://here:1"]}}
    terms = {
        "a": options | {"format": "mistral"},
        "b": other | {"format": "glm", "call": {"workers": "process"}},
        "c": options | {"format": "kimi_k2", "call": http},
        "d": options | {"format": "list"},
        "e": yaml_options("reward/terms/exact_match.yaml")["exact_match"],
    }
    reward = reward_of(terms, "a")
    found = {name: term.tool_calls and term.tool_calls.name for name, term in reward.terms.items()}
    reward.close()
    assert found == {"a": "mistral", "b": "glm", "c": "kimi_k2", "d": None, "e": None}
