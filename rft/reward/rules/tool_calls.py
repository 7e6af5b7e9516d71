"""Does a response call the right tools with the right arguments? And the reward of an environment that has tools."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rft.batch.entries import EPISODE
from rft.reward.registry import REWARDS
from rft.reward.rules.json_schema import (
    TOO_DEEP,
    canonical,
    field_value,
    is_valid,
    json_text,
    json_value,
    missing_package,
    schema_fault,
)
from rft.reward.rules.tags import bad_tag
from rft.reward.term import Unscored

NO_ARGUMENTS = {"type": "object", "maxProperties": 0}


def calls_in(response: str, tag: str | None) -> list[dict[str, Any] | None] | None:
    """The calls of a response: {"name": text, "arguments": object} each, or None for a malformed one.

    Args:
        response: the text.
        tag: of the blocks that hold a call each; None: the response, or its last fenced block, is a list of calls.

    Returns:
        None if the blocks are not opened and closed in turn, or the list is not JSON.
    """
    if tag is None:
        text = json_text(response, None, "optional")
        listed = _value(text or "")
        if not isinstance(listed, list | dict):
            return None
        return [_call(item) for item in (listed if isinstance(listed, list) else [listed])]
    marks = re.compile(f"<{re.escape(tag)}>|</{re.escape(tag)}>")
    found = marks.findall(response)
    if found != [f"<{tag}>", f"</{tag}>"] * (len(found) // 2):
        return None
    return [_call(_value(text)) for text in marks.split(response)[1::2]]


def _value(text: str) -> Any:
    try:
        return json_value(text)
    except ValueError:
        return None


def _call(value: Any) -> dict[str, Any] | None:
    right = isinstance(value, dict) and {*value} == {"name", "arguments"} and isinstance(value["name"], str)
    return value if right and isinstance(value["arguments"], dict) else None


def _function(item: Any) -> Any:
    """An entry of a list of calls or tools: OpenAI's format has it inside `function`."""
    return item["function"] if isinstance(item, dict) and isinstance(item.get("function"), dict) else item


def _expected(row: Mapping[str, Any], field: str) -> list[str]:
    """The calls of a row, as canonical texts.

    Raises:
        ValueError: they are no calls; names the field.
    """
    value = field_value(row, field)
    found = []
    for item in value if isinstance(value, list) else [value]:
        call = _function(item)
        if isinstance(call, dict) and {"name", "arguments"} <= {*call}:
            arguments = field_value(call, "arguments")
            call = _call({"name": call["name"], "arguments": arguments})
        else:
            call = None
        if call is None:
            raise ValueError(
                f"the field {field!r} has what is no call: {item!r:.80}; write a list of "
                '{"name": ..., "arguments": {...}}, best as a JSON text'
            )
        found.append(canonical(call))
    return found


def _made(response: str, tag: str | None) -> list[str] | None:
    """The calls of a response as canonical texts; a malformed one is an empty text. None as in `calls_in`."""
    calls = calls_in(response, tag)
    return None if calls is None else ["" if call is None else canonical(call) for call in calls]


def _common(left: Sequence[str], right: Sequence[str], ordered: bool) -> int:
    """How many calls two lists have in common; with an order, the length of their longest common subsequence."""
    if not ordered:
        return (Counter(left) & Counter(right)).total()
    lengths = [0] * (len(right) + 1)
    for one in left:
        before = lengths
        lengths = [0]
        for place, other in enumerate(right):
            lengths.append(before[place] + 1 if one == other else max(before[place + 1], lengths[place]))
    return lengths[-1]


def _votes(response: str, tag: str | None, ordered: bool) -> str | None:
    made = _made(response, tag)
    if made is None or "" in made:
        return None
    return f"[{', '.join(made if ordered else sorted(made))}]"


def _written(row: Mapping[str, Any], field: str, tag: str | None, ordered: bool) -> list[str]:
    expected = _expected(row, field)
    texts = []
    for calls in (expected,) if ordered else (expected, expected[::-1]):
        if tag is None:
            texts += [f"[{', '.join(calls)}]", f"I call:\n```json\n[{', '.join(calls)}]\n```\n"]
        else:
            blocks = "\n".join(f"<{tag}>{call}</{tag}>" for call in calls)
            texts += [blocks, f"<think>Which tool?</think>\n{blocks}\n"]
    return texts


def _tag_fault(options: Mapping[str, Any]) -> str | None:
    return None if options["tag"] is None else bad_tag("tag", options["tag"])


@REWARDS.register(
    "tool_call",
    reads=lambda options: (options["field"],),
    thoughts="skip",
    extract=_votes,
    gold=_expected,
    writes=_written,
    others=lambda options: "less" if options["score"] == "share" else "zero",
    fault=_tag_fault,
)
def tool_call(
    response: str, row: Mapping[str, Any], *, field: str, tag: str | None, ordered: bool, score: Literal["all", "share"]
) -> float:
    """1 where the response calls the tools that the row expects with equal arguments, else 0 or the share of calls.

    Arguments are equal as JSON values: the order of keys does not count, 1.0 is 1, true is not 1. A response whose
    calls cannot be read has 0. If the row expects no call, a response without a call is right.

    Args:
        field: the field of the row with the expected calls, a list of {"name": ..., "arguments": {...}}, as
            objects, in OpenAI's format, or as a JSON text.
        tag: of the blocks with a call each, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; null: the
            response, or its last fenced block, is the list.
        ordered: the order of the calls counts.
        score: "all": only if all calls are equal; "share": the number of equal calls / the larger number of calls, of
            the row or the response.

    Raises:
        ValueError: the field of the row has what is no call.
    """
    expected, made = _expected(row, field), _made(response, tag)
    if made is None:
        return 0.0
    if not expected and not made:
        return 1.0
    equal = _common(expected, made, ordered) / max(len(expected), len(made))
    return equal if score == "share" else float(equal == 1.0)


def _schemas(row: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The schema of the arguments of each tool of a row, by name.

    Raises:
        ValueError: the field is no list of tools; names it.
    """
    tools = field_value(row, field)
    listed = [_function(tool) for tool in tools] if isinstance(tools, list) else []
    if not listed or not all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in listed):
        raise ValueError(
            f"the field {field!r} is no list of tools: {tools!r:.80}; write a list of "
            '{"name": ..., "parameters": {...}}, best as a JSON text'
        )
    return {tool["name"]: NO_ARGUMENTS if tool.get("parameters") is None else tool["parameters"] for tool in listed}


def _sound_schemas(row: Mapping[str, Any], field: str) -> None:
    for name, schema in _schemas(row, field).items():
        if (fault := schema_fault(schema)) is not None:
            raise ValueError(
                f"the field {field!r}: the parameters of {name!r} are no JSON schema: {fault}; write the tools as a "
                "JSON text"
            )


@REWARDS.register(
    "tool_call_valid",
    reads=lambda options: (options["field"],),
    thoughts="skip",
    gold=_sound_schemas,
    fault=lambda options: _tag_fault(options) or (f"name {fault}" if (fault := missing_package()) else None),
)
def tool_call_valid(
    response: str, row: Mapping[str, Any], *, field: str, tag: str | None, score: Literal["all", "share"]
) -> float | Unscored:
    """1 where the calls of the response name tools of the row and their arguments are valid, else 0 or the share.

    A response without a call, or whose calls cannot be read, has 0.

    Args:
        field: the field of the row with the tools, a list of {"name": ..., "parameters": JSON schema}, as objects, in
            OpenAI's format, or as a JSON text. A tool without `parameters` takes no arguments.
        tag: as in `tool_call`.
        score: "all": only if all calls are valid; "share": the number of valid calls / the number of calls.

    Returns:
        Unscored if arguments are nested too deeply for a schema that refers to itself.

    Raises:
        ValueError: the field of the row is no list of tools.
    """
    schemas, calls = _schemas(row, field), calls_in(response, tag)
    if not calls:
        return 0.0
    try:
        valid = sum(
            call is not None and call["name"] in schemas and is_valid(call["arguments"], schemas[call["name"]])
            for call in calls
        )
    except RecursionError:
        return Unscored(TOO_DEEP)
    return float(valid == len(calls)) if score == "all" else valid / len(calls)


@REWARDS.register("environment")
def environment(response: str, row: Mapping[str, Any]) -> float | Unscored:
    """What `get_reward` of the episode's environment returned, the sum of the rewards of its `step`, or what an agent
    returned. Of an episode that failed it is 0: the run drops all its scores later, and must not stop here."""
    reward = row[EPISODE]["reward"]
    if row[EPISODE]["failed"] is not None:
        return 0.0
    return Unscored("the agent returned no reward") if reward is None else float(reward)
