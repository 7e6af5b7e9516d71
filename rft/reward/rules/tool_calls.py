"""Does a response call the right tools with the right arguments? And the reward of an environment that has tools."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rft.batch.row_fields import EPISODE_FIELD
from rft.data.strict_json import value_of
from rft.data.tool_calls import TOOL_CALLS, Schema, ToolCall
from rft.errors import did_you_mean, messages_of
from rft.registry import Plugin
from rft.reward.rules.json_schema import (
    TOO_DEEP,
    canonical,
    field_value,
    is_valid,
    json_text,
    missing_package,
    schema_fault,
)
from rft.reward.term import REWARDS, Unscored

NO_ARGUMENTS = {"type": "object", "maxProperties": 0}
LIST = "list"  # the format of a response that is a JSON list of calls
Format = str | dict[str, Any]  # the name of a format of calls, or {name: ..., options}


def _node(format: Format) -> dict[str, Any]:
    return {"name": format} if isinstance(format, str) else format


def _plugin(format: Format) -> Plugin | None:
    """The format of the registry; None for `list`."""
    node = _node(format)
    return None if node["name"] == LIST else TOOL_CALLS.build(node, "format")


def _format_fault(format: Format) -> str | None:
    node, formats = _node(format), [LIST, *TOOL_CALLS.names()]
    name = str(node.get("name"))
    if name not in formats:
        cure = f"{did_you_mean(name, formats)}; choose one of: {', '.join(formats)}"
        return f"format: no format of tool calls is called {name!r}{cure}"
    if name == LIST and len(node) > 1:
        return "format: list takes no options; write format: list"
    try:
        _plugin(node)
    except ValueError as error:
        return "; ".join(messages_of(error))
    return None


def calls_in(response: str, format: Format, tools: Mapping[str, Schema]) -> list[ToolCall] | None:
    """The calls of a response.

    Args:
        response: the text without thoughts.
        format: in which the calls are written.
        tools: schemas by the names of the tools.

    Returns:
        None if a call cannot be read, a mark of the format stands outside of the calls, or the list is not JSON.
    """
    plugin = _plugin(format)
    if plugin is None:
        return _listed(response)
    content, calls = plugin(response, tools)
    if any(mark in content for mark in plugin.facts.marks):
        return None
    return _all_read([call if isinstance(call, ToolCall) else None for call in calls])


def _listed(response: str) -> list[ToolCall] | None:
    """The calls of a response that is, or whose last fenced block is, a JSON list of them or a single one."""
    try:
        value = value_of(json_text(response, None, "optional") or "", unique=True)
    except ValueError:
        return None
    return _all_read([_call(item) for item in (value if isinstance(value, list) else [value])])


def _all_read(calls: Sequence[ToolCall | None]) -> list[ToolCall] | None:
    read = [call for call in calls if call is not None]
    return read if len(read) == len(calls) else None


def _call(value: Any) -> ToolCall | None:
    right = isinstance(value, dict) and {*value} == {"name", "arguments"} and isinstance(value["name"], str)
    return ToolCall(**value) if right and isinstance(value["arguments"], dict) else None


def _function(item: Any) -> Any:
    """An entry of a list of calls or tools: OpenAI's format has it inside `function`."""
    return item["function"] if isinstance(item, dict) and isinstance(item.get("function"), dict) else item


def _expected(row: Mapping[str, Any], field: str) -> list[ToolCall]:
    """The calls of a row.

    Raises:
        ValueError: they are no calls; names the field.
    """
    value = field_value(row, field)
    calls = []
    for item in value if isinstance(value, list) else [value]:
        function, call = _function(item), None
        if isinstance(function, dict) and {"name", "arguments"} <= {*function}:
            call = _call({"name": function["name"], "arguments": field_value(function, "arguments")})
        if call is None:
            raise ValueError(
                f"the field {field!r} has what is no call: {item!r:.80}; write a list of "
                '{"name": ..., "arguments": {...}}, best as a JSON text'
            )
        calls.append(call)
    return calls


def _texts(calls: Sequence[ToolCall]) -> list[str]:
    """One text for each call, the same for equal ones."""
    return [canonical({"name": call.name, "arguments": call.arguments}) for call in calls]


def _gold(row: Mapping[str, Any], field: str) -> list[str]:
    return _texts(_expected(row, field))


def _schema(name: str, parameters: Any) -> Schema:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _schemas_of(calls: Sequence[ToolCall]) -> dict[str, Schema]:
    """Schemas of tools that take the arguments of these calls.

    A format that writes values without types reads each as a value of the type of the expected one.
    """
    values: dict[str, dict[str, list[Any]]] = {}
    for call in calls:
        of_tool = values.setdefault(call.name, {})
        for name, value in call.arguments.items():
            of_tool.setdefault(name, []).append(value)
    return {
        tool: _schema(tool, {"properties": {name: {"enum": found} for name, found in of_tool.items()}})
        for tool, of_tool in values.items()
    }


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


def _votes(response: str, format: Format, ordered: bool) -> str | None:
    calls = calls_in(response, format, {})
    if calls is None:
        return None
    made = _texts(calls)
    return f"[{', '.join(made if ordered else sorted(made))}]"


def _written(row: Mapping[str, Any], field: str, format: Format, ordered: bool) -> list[str]:
    """Right responses in the formats `hermes` and `list`; none in another one, which chat templates write."""
    expected, name = _gold(row, field), _node(format)["name"]
    texts = []
    for calls in (expected,) if ordered else (expected, expected[::-1]):
        if name == LIST:
            texts += [f"[{', '.join(calls)}]", f"I call:\n```json\n[{', '.join(calls)}]\n```\n"]
        elif name == "hermes":
            blocks = "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)
            texts += [blocks, f"<think>Which tool?</think>\n{blocks}\n"]
    return texts


@REWARDS.register(
    "tool_call",
    reads=lambda field: (field,),
    thoughts="skip",
    tool_calls=_plugin,
    extract=_votes,
    gold=_gold,
    writes=_written,
    others=lambda score: "less" if score == "share" else "zero",
    fault=_format_fault,
)
def tool_call(
    response: str, row: Mapping[str, Any], *, field: str, format: Format, ordered: bool, score: Literal["all", "share"]
) -> float:
    """1 where the response calls the tools that the row expects with equal arguments, else 0 or the share of calls.

    Arguments are equal as JSON values: the order of keys does not count, 1.0 is 1, true is not 1. A response with a
    call that cannot be read has 0. If the row expects no call, a response without a call is right. A format that writes
    values without types needs no schemas: a value has the type of the expected one. mode=verify certifies the formats
    `hermes` and `list`.

    Args:
        field: the field of the row with the expected calls, a list of {"name": ..., "arguments": {...}}, as
            objects, in OpenAI's format, or as a JSON text.
        format: how calls are written: the name of an entry of `TOOL_CALLS`, or {name: ..., options}. "list": the
            response, or its last fenced block, is a JSON list of {"name": ..., "arguments": {...}}.
        ordered: the order of the calls counts.
        score: "all": only if all calls are equal; "share": the number of equal calls / the larger number of calls, of
            the row or the response.

    Raises:
        ValueError: the field of the row has what is no call.
    """
    expected = _expected(row, field)
    made = calls_in(response, format, _schemas_of(expected))
    if made is None:
        return 0.0
    if not expected and not made:
        return 1.0
    equal = _common(_texts(expected), _texts(made), ordered) / max(len(expected), len(made))
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
    reads=lambda field: (field,),
    thoughts="skip",
    tool_calls=_plugin,
    gold=_sound_schemas,
    fault=lambda format: _format_fault(format) or (f"name {fault}" if (fault := missing_package()) else None),
)
def tool_call_valid(
    response: str, row: Mapping[str, Any], *, field: str, format: Format, score: Literal["all", "share"]
) -> float | Unscored:
    """1 where the calls of the response name tools of the row and their arguments are valid, else 0 or the share.

    A response without a call, or with one that cannot be read, has 0.

    Args:
        field: the field of the row with the tools, a list of {"name": ..., "parameters": JSON schema}, as objects, in
            OpenAI's format, or as a JSON text. A tool without `parameters` takes no arguments.
        format: as in `tool_call`; values without types have those that the schema of the tool states.
        score: "all": only if all calls are valid; "share": the number of valid calls / the number of calls.

    Returns:
        Unscored if arguments are nested too deeply for a schema that refers to itself.

    Raises:
        ValueError: the field of the row is no list of tools.
    """
    schemas = _schemas(row, field)
    calls = calls_in(response, format, {name: _schema(name, parameters) for name, parameters in schemas.items()})
    if not calls:
        return 0.0
    try:
        valid = sum(call.name in schemas and is_valid(call.arguments, schemas[call.name]) for call in calls)
    except RecursionError:
        return Unscored(TOO_DEEP)
    return float(valid == len(calls)) if score == "all" else valid / len(calls)


@REWARDS.register("environment")
def environment(response: str, row: Mapping[str, Any]) -> float | Unscored:
    """What `get_reward` of the episode's environment returned, the sum of the rewards of its `step`, or what an agent
    returned. Of an episode that failed it is 0: the run drops all its scores later, and must not stop here."""
    reward = row[EPISODE_FIELD]["reward"]
    if row[EPISODE_FIELD]["failed"] is not None:
        return 0.0
    return Unscored("the agent returned no reward") if reward is None else float(reward)
