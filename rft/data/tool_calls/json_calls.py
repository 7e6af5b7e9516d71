# ruff: noqa: RUF001  (bars of DeepSeek)
"""Formats whose calls are JSON between marks: Hermes, Mistral, DeepSeek and Kimi."""

import re
from collections.abc import Callable, Mapping

from rft.data.strict_json import value_at, value_of
from rft.data.tool_calls.base import NAME, TOOL_CALLS, Found, Schema, ToolCall, blocks, call_of, named_call

HERMES = ("<tool_call>", "</tool_call>")
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


@TOOL_CALLS.register("hermes", marks=HERMES, openings=HERMES[:1], closing=HERMES[1])
def hermes(text: str, tools: Mapping[str, Schema]) -> Found:
    """Blocks `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes models write them."""
    content, inside, rest = blocks(text, *HERMES)
    found: list[ToolCall | str] = [_from_json(block) for block in inside]
    return content.strip(), found if rest is None else [*found, "a <tool_call> is not closed"]


def _from_json(block: str) -> ToolCall | str:
    try:
        return call_of(value_of(block))
    except ValueError as error:
        return f"the call is no JSON ({error})"


@TOOL_CALLS.register("mistral", marks=MISTRAL, openings=MISTRAL[:1])
def mistral(text: str, tools: Mapping[str, Schema]) -> Found:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

    The first is that of Mistral's tokenizers before version 11, the second that of later ones, some of which write
    `[CALL_ID]id` between the name and `[ARGS]`.
    """
    content = text.partition(MISTRAL[0])[0]
    found: list[ToolCall | str] = []
    place = text.find(MISTRAL[0])
    while place >= 0:
        try:
            calls, place = _mistral_calls(text, place + len(MISTRAL[0]))
        except ValueError as error:  # the end of the call is not known, and so no call behind it
            found.append(f"the call is no JSON ({error})")
            break
        found += calls
        following = text.find(MISTRAL[0], place)
        if text[place : following if following >= 0 else len(text)].strip():  # it may be a thought
            found.append("behind a call stands a text that is no call")
            break
        place = following
    return content.strip(), found


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
    found: list[ToolCall | str] = []
    for section in [*inside, *([] if last is None else [last])]:
        beside, calls, rest = blocks(section, call_opening, call_closing)
        for call in calls:
            left, separated, right = call.partition(separator)
            found.append(read(left, right) if separated else f"a call has no {separator}")
        if rest is not None:
            found.append(f"a {call_opening} is not closed")
        if beside.strip():
            found.append("a section of calls has a text that is no call")
        elif not calls and rest is None:
            found.append("a section has no call")
    return content.strip(), found
