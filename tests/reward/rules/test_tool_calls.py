"""Which calls a response makes, and how many of them are those of the row."""

import json

import pytest

from rft.registry import Plugin
from rft.reward import REWARDS
from rft.reward.rules.tool_calls import calls_in
from rft.reward.term import Unscored

RAIN = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
TIME = {"name": "time", "arguments": {}}
SUM = {"name": "sum", "arguments": {"terms": [1, 2]}}


def hermes(*calls: object) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def rule(**options: object) -> Plugin:
    node = {"name": "tool_call", "field": "answer", "tag": "tool_call", "ordered": False, "score": "all"}
    return REWARDS.build(node | options, "reward.terms.calls")


def valid(**options: object) -> Plugin:
    node = {"name": "tool_call_valid", "field": "tools", "tag": "tool_call", "score": "all"}
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
    ([RAIN], [RAIN | {"id": 1}], 0.0, 0.0, 0.0, 0.0),  # malformed
    ([SUM], [{"name": "sum", "arguments": {"terms": [2, 1]}}], 0.0, 0.0, 0.0, 0.0),
    ([RAIN, TIME], [RAIN, {"name": "time"}], 0.0, 1 / 2, 0.0, 1 / 2),
]


@pytest.mark.parametrize(("expected", "made", "whole", "share", "in_order", "share_in_order"), VALUES)
def test_values(expected, made, whole, share, in_order, share_in_order) -> None:
    found = {
        (False, "all"): whole, (False, "share"): share, (True, "all"): in_order, (True, "share"): share_in_order
    }  # fmt: skip
    for (ordered, score), value in found.items():
        for row in ({"answer": expected}, {"answer": json.dumps(expected)}):
            assert rule(ordered=ordered, score=score)(hermes(*made), row) == pytest.approx(value, abs=1e-12)
            listed = rule(ordered=ordered, score=score, tag=None)
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
        '<tool_call>{"name": "time", "name": "weather", "arguments": {}}</tool_call>',
        "",
    ],
)
def test_calls_that_cannot_be_read(response: str) -> None:
    for score in ("all", "share"):
        assert rule(score=score)(response, {"answer": [RAIN]}) == 0.0


def test_text_around_the_calls_does_not_count() -> None:
    response = f"<think>It may rain.</think>\n{hermes(RAIN)} and {hermes(TIME)}"
    assert rule()(response, {"answer": [TIME, RAIN]}) == 1.0
    assert rule(tag=None)(response, {"answer": [TIME, RAIN]}) == 0.0
    assert rule(tag="call")(f"<call>{json.dumps(RAIN)}</call>", {"answer": [RAIN]}) == 1.0


def test_a_single_object_is_a_list_of_one() -> None:
    assert calls_in(json.dumps(RAIN), None) == [RAIN]
    assert rule()(hermes(RAIN), {"answer": RAIN}) == 1.0
    assert calls_in("7", None) is None


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
    assert found(RAIN, {"name": "time"}) is None
    assert rule().call("extract", "<tool_call>") is None
    assert rule().call("extract", "It rains.") == "[]"


TOOLS = [
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
        ([{"name": "time"}, TIME], 0.0, 1 / 2),
        ([], 0.0, 0.0),
    ],
)
def test_valid_calls(calls: list, whole: float, share: float) -> None:
    for row in ({"tools": TOOLS}, {"tools": json.dumps(TOOLS)}):
        valid().call("gold", row)
        assert valid()(hermes(*calls), row) == whole
        assert valid(score="share")(hermes(*calls), row) == pytest.approx(share, abs=1e-12)
        assert valid(tag=None)(json.dumps(calls), row) == whole


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


def test_options_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for build, name in ((rule, "calls"), (valid, "valid")):
        with pytest.raises(ValueError, match=rf"^reward\.terms\.{name}\.tag: '<tool_call>' is no name of a tag"):
            build(tag="<tool_call>")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rule()
    with pytest.raises(ValueError, match=r"^reward\.terms\.valid\.name needs the package jsonschema; pip install"):
        valid()


def test_the_reward_of_an_episode():
    reward = REWARDS.build({"name": "environment"}, "reward.terms.environment")
    assert reward("any text", {"episode": {"reward": 2.5, "failed": None}}) == 2.5
    assert isinstance(reward("any text", {"episode": {"reward": None, "failed": None}}), Unscored)
    assert reward("any text", {"episode": {"reward": None, "failed": "OSError: gone"}}) == 0.0
