# ruff: noqa: RUF001  (bars of DeepSeek)
"""Formats whose calls stand between or behind marks: JSON, or arguments between tags, as texts without a type.

The schema of the tool gives the type of an argument between tags; `argument_value` has the rules.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rft.data.strict_json import DEEPEST, value_at, value_of
from rft.data.tool_calls.base import NAME, TOOL_CALLS, Found, Schema, ToolCall, blocks, call_of, named_call

BLOCK = ("<tool_call>", "</tool_call>")
MISTRAL = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
MISTRAL_NAME = re.compile(rf"\s*({NAME})(?:\[CALL_ID\]{NAME})?(?:\[ARGS\])?")
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
FENCE = ("```json", "```")
KIMI = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
KIMI_NAME = re.compile(rf"\s*(?:functions\.)?({NAME}):\d+\s*")
FUNCTION = re.compile(rf"\s*<function=({NAME})>(.*)</function>\s*", re.DOTALL)
# The closing tag is the first behind which the next parameter begins or the last one ends: a value may quote a tag.
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|\Z))", re.DOTALL)
QWEN = (*BLOCK, "<function=", "</function>", "<parameter=", "</parameter>")
GLM_CALL = re.compile(rf"\s*({NAME})\s*((?:<arg_key>.*)?)", re.DOTALL)
GLM_PAIR = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL)
GLM = (*BLOCK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
BEHIND = re.compile("|".join(map(re.escape, (START, *ENDS))))
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
# How Python writes what JSON writes in another way. Some templates write arguments so, such as that of Qwen3.5.
PYTHON = {"True": True, "False": False, "None": None}
KINDS = {str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"}}
KINDS |= {dict: {"object"}, type(None): {"null"}}


def _block_calls(text: str, read: Callable[[str], ToolCall | str]) -> Found:
    """The content beside blocks, and the call that `read` makes of each."""
    content, inside, rest = blocks(text, *BLOCK)
    calls = list(map(read, inside))
    return content.strip(), calls if rest is None else [*calls, "a <tool_call> is not closed"]


@TOOL_CALLS.register("hermes", marks=BLOCK, openings=BLOCK[:1], closing=BLOCK[1])
def hermes(text: str, tools: Mapping[str, Schema]) -> Found:
    """Blocks `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes models write them."""
    return _block_calls(text, _from_json)


def _from_json(block: str) -> ToolCall | str:
    try:
        return call_of(value_of(block))
    except ValueError as error:
        return f"the call is no JSON ({error})"


@TOOL_CALLS.register("qwen_xml", marks=QWEN, openings=BLOCK[:1], closing=BLOCK[1])
def qwen_xml(text: str, tools: Mapping[str, Schema]) -> Found:
    """Blocks `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    Qwen3-Coder, Qwen3.5 and Nemotron 3 write them, with a line break around each value.
    """
    forms = "<function=name> ... </function>", "<parameter=key>value</parameter>"
    return _block_calls(text, partial(_tagged_call, tools, FUNCTION, PARAMETER, *forms))


@TOOL_CALLS.register("glm", marks=GLM, openings=BLOCK[:1], closing=BLOCK[1])
def glm(text: str, tools: Mapping[str, Schema]) -> Found:
    """Blocks `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>` of GLM-4.5 and later."""
    pair = "<arg_key>key</arg_key><arg_value>value</arg_value>"
    return _block_calls(text, partial(_tagged_call, tools, GLM_CALL, GLM_PAIR, f"name{pair}", pair))


def _tagged_call(
    tools: Mapping[str, Schema], call: re.Pattern[str], pair: re.Pattern[str], form: str, pair_form: str, block: str
) -> ToolCall | str:
    """The call of a block.

    Args:
        call: matches a block; its groups are the name of the tool and the text of the pairs.
        pair: matches a pair; its groups are the key and the text of the value.
        form, pair_form: how both are written, for reasons.
    """
    named = call.fullmatch(block)
    if named is None:
        return f"the call is no {form}"
    name, body = named.groups()
    arguments, place = {}, 0
    while (matched := pair.match(body, place)) is not None:
        key, place = matched[1].strip(), matched.end()
        try:
            arguments[key] = argument_value(matched[2], parameter_kinds(tools, name, key))
        except ValueError as error:
            return f"the argument {key} of {name} is {error}"
    rest = body[place:].strip()
    return f"an argument of {name} is no {pair_form}: {rest!r:.60}" if rest else ToolCall(name, arguments)


@TOOL_CALLS.register("mark", described=False, openings=lambda marks: tuple(marks))
def mark(text: str, tools: Mapping[str, Schema], *, marks: dict[str, str]) -> Found:
    """An answer that begins with a mark is a call, for small models: `?12` calls the tool of `?` with "12".

    Args:
        marks: the tool of each mark. The text behind the mark is the first argument of a tool that takes any.
    """
    for sign, name in marks.items():
        if text.startswith(sign):
            rest = text.removeprefix(sign)
            return text, [ToolCall(name, {argument: rest for argument in list(properties(tools, name))[:1]})]
    return text, []


@TOOL_CALLS.register("mistral", marks=MISTRAL, openings=MISTRAL[:1])
def mistral(text: str, tools: Mapping[str, Schema]) -> Found:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    The first is that of Mistral's tokenizers before version 11, the second that of later ones, some of which write
    `[CALL_ID]id` between the name and `[ARGS]`.
    """
    content = text.partition(MISTRAL[0])[0]
    calls_of_answer: list[ToolCall | str] = []
    place = text.find(MISTRAL[0])
    while place >= 0:
        try:
            calls, place = _mistral_calls(text, place + len(MISTRAL[0]))
        except ValueError as error:  # the end of the call is not known, and so no call behind it
            calls_of_answer.append(f"the call is no JSON ({error})")
            break
        calls_of_answer += calls
        following = text.find(MISTRAL[0], place)
        if text[place : following if following >= 0 else len(text)].strip():  # it may be a thought
            calls_of_answer.append("behind a call stands a text that is no call")
            break
        place = following
    return content.strip(), calls_of_answer


def _mistral_calls(text: str, place: int) -> tuple[list[ToolCall | str], int]:
    """The calls behind a mark, and the index of their end. Raises as `value_at`."""
    named = MISTRAL_NAME.match(text, place)
    value, end = value_at(text, place if named is None else named.end())
    if named is not None:
        return [call_of({"name": named[1], "arguments": value})], end
    return [call_of(item) for item in (value if isinstance(value, list) else [value])], end


@TOOL_CALLS.register("deepseek", marks=DEEPSEEK, openings=DEEPSEEK[:1], closing=DEEPSEEK[-1])
def deepseek(text: str, tools: Mapping[str, Schema]) -> Found:
    """DeepSeek's section of calls.

    A call of V3 and R1 is the word `function`, a mark, the name and a fenced block of JSON; one of V3.1 is the name, a
    mark and JSON.
    """
    return _sections(text, DEEPSEEK, _deepseek_call)


def _deepseek_call(left: str, right: str) -> ToolCall | str:
    name, fenced, arguments = right.strip().partition(FENCE[0])
    if left.strip() == "function" and fenced and arguments.endswith(FENCE[1]):
        return named_call(name.strip(), arguments.removesuffix(FENCE[1]))
    return named_call(left.strip(), right)


@TOOL_CALLS.register("kimi_k2", marks=KIMI, openings=KIMI[:1], closing=KIMI[-1])
def kimi_k2(text: str, tools: Mapping[str, Schema]) -> Found:
    """Kimi K2's section of calls, each an id `functions.name:number`, a mark and JSON."""
    return _sections(text, KIMI, _kimi_call)


def _kimi_call(left: str, right: str) -> ToolCall | str:
    named = KIMI_NAME.fullmatch(left)
    if named is None:
        return f"the id of the call is {left.strip()!r:.60}, not functions.name:number"
    return named_call(named[1], right)


def _sections(text: str, marks: tuple[str, ...], read: Callable[[str, str], ToolCall | str]) -> Found:
    """The calls in sections.

    Args:
        marks: that open a section, open a call, separate its two parts, close the call and close the section.
        read: a call, from its two parts.
    """
    opening, call_opening, separator, call_closing, closing = marks
    content, inside, last = blocks(text, opening, closing)
    calls_of_answer: list[ToolCall | str] = []
    for section in [*inside, *([] if last is None else [last])]:
        beside, calls, rest = blocks(section, call_opening, call_closing)
        for call in calls:
            left, separated, right = call.partition(separator)
            calls_of_answer.append(read(left, right) if separated else f"a call has no {separator}")
        if rest is not None:
            calls_of_answer.append(f"a {call_opening} is not closed")
        if beside.strip():
            calls_of_answer.append("a section of calls has a text that is no call")
        elif not calls and rest is None:
            calls_of_answer.append("a section has no call")
    return content.strip(), calls_of_answer


@TOOL_CALLS.register("harmony", marks=(START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS), openings=(CHANNEL,))
def harmony(text: str, tools: Mapping[str, Schema]) -> Found:
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`.

    The recipient may also stand before the channel. A message to a recipient is a call. Another one of the channel
    `analysis` is a thought, and any other is content. The template of gpt-oss writes the content of an answer with
    calls to `analysis`, and drops the thoughts of an answer without calls. So the content of an answer with calls
    begins with its thoughts, that of another one has no thoughts unless it has nothing else.
    """
    thoughts: list[str] = []
    content: list[str] = []
    calls: list[ToolCall | str] = []
    place = 0
    while place < len(text):
        start = text.find(MESSAGE, place)
        head = text[place : start if start >= 0 else len(text)]
        recipient = RECIPIENT.search(head)
        if start < 0:
            if recipient is not None:
                calls.append(f"the call of {recipient[1]} has no {MESSAGE}")
            elif not place:  # an answer without channels
                return text.strip(), []
            break
        end = BEHIND.search(text, start)
        body = text[start + len(MESSAGE) : end.start() if end else len(text)]
        if recipient is not None:
            call = named_call(recipient[1], body)
            cut = end is None and isinstance(call, str)
            calls.append(f"the call of {recipient[1]} is not closed" if cut else call)
        else:
            (thoughts if f"{CHANNEL}analysis" in head else content).append(body.strip())
        place = len(text) if end is None else end.start() if end[0] == START else end.end()
    shown = [*thoughts, *content] if calls else content or thoughts
    return "\n\n".join(part for part in shown if part), calls


def argument_value(text: str, kinds: frozenset[str] | None) -> Any:
    """The value of an argument that a format writes without its type.

    Args:
        kinds: types that the schema allows; None where it states none. A string stays the text. A text that is not
            JSON, or JSON of another type, is one where a string is allowed or no type is stated.

    Raises:
        ValueError: it is not JSON, and no string is allowed.
    """
    if kinds == {"string"}:
        return text
    textual = kinds is None or "string" in kinds
    try:
        value = value_of(text)
    except ValueError as error:
        if textual:
            return text
        if text.strip() in PYTHON:
            return PYTHON[text.strip()]
        assert kinds is not None
        raise ValueError(f"no JSON of type {' or '.join(sorted(kinds))}: {error}") from None
    return text if textual and kinds is not None and not KINDS[type(value)] & kinds else value


def properties(tools: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The schemas of the parameters of a tool by their names; empty where the tool or its parameters are unknown."""
    schemas = _parameters(tools, name).get("properties")
    return schemas if isinstance(schemas, dict) else {}


def parameter_kinds(tools: Mapping[str, Any], name: str, parameter: str) -> frozenset[str] | None:
    """The JSON types that the schema of a tool allows for a parameter; None where it states none."""
    return _kinds(properties(tools, name).get(parameter), _parameters(tools, name), DEEPEST)


def _parameters(tools: Mapping[str, Any], name: str) -> dict[str, Any]:
    parameters = tools[name]["function"].get("parameters") if name in tools else None
    return parameters if isinstance(parameters, dict) else {}


def _kinds(schema: Any, root: Any, left: int) -> frozenset[str] | None:
    if not isinstance(schema, dict) or not left:
        return None
    stated = schema.get("type")
    found: frozenset[str] | None = None
    if isinstance(stated, str | list):
        found = frozenset([stated] if isinstance(stated, str) else map(str, stated))
    elif isinstance(schema.get("$ref"), str):
        found = _kinds(_target(schema["$ref"], root), root, left - 1)
    elif isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        found = frozenset().union(*(KINDS[type(value)] for value in values))
    elif isinstance(branches := schema.get("anyOf", schema.get("oneOf")), list):
        each = [_kinds(branch, root, left - 1) for branch in branches]
        found = None if None in each else frozenset().union(*(kinds for kinds in each if kinds))
    elif isinstance(schema.get("allOf"), list):
        each = [_kinds(branch, root, left - 1) for branch in schema["allOf"]]
        found = next((kinds for kinds in each if kinds), None)
    return found | {"null"} if found and schema.get("nullable") is True else found


def _target(reference: str, root: Any) -> Any:
    """The schema that a reference within the schema of the parameters names; None if there is none."""
    start, *path = reference.split("/")
    for step in path if start == "#" else [""]:
        root = root.get(step) if isinstance(root, dict) else None
    return root
