"""Formats whose arguments stand between tags, as texts without a type: Qwen3-Coder's and GLM's.

The schema of the tool gives the type of an argument; `argument_value` has the rules.
"""

import re
from collections.abc import Mapping

from rft.data.tool_calls.base import NAME, TOOL_CALLS, Found, Schema, ToolCall, blocks
from rft.data.tool_calls.values import argument_value, parameter_kinds

BLOCK = ("<tool_call>", "</tool_call>")
FUNCTION = re.compile(rf"\s*<function=({NAME})>(.*)</function>\s*", re.DOTALL)
# The closing tag is the first behind which the next parameter begins or the last one ends: a value may quote a tag.
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=[^>\n]+>|\Z))", re.DOTALL)
QWEN = (*BLOCK, "<function=", "</function>", "<parameter=", "</parameter>")
GLM_NAME = re.compile(rf"\s*({NAME})\s*(?=<arg_key>|\Z)")
GLM_PAIR = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL)
GLM = (*BLOCK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@TOOL_CALLS.register("qwen_xml", marks=QWEN, openings=BLOCK[:1], closing=BLOCK[1])
def qwen_xml(text: str, tools: Mapping[str, Schema]) -> Found:
    """Blocks `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    Qwen3-Coder, Qwen3.5 and Nemotron 3 write them, with a line break around each value.
    """
    content, inside, rest = blocks(text, *BLOCK)
    found = [_qwen_call(block, tools) for block in inside]
    return content.strip(), found if rest is None else [*found, "a <tool_call> is not closed"]


def _qwen_call(block: str, tools: Mapping[str, Schema]) -> ToolCall | str:
    function = FUNCTION.fullmatch(block)
    if function is None:
        return "the call is no <function=name> ... </function>"
    name, body = function.groups()
    pairs, place = [], 0
    while (pair := PARAMETER.match(body, place)) is not None:
        pairs.append((pair[1].strip(), pair[2].removeprefix("\n").removesuffix("\n")))
        place = pair.end()
    if body[place:].strip():
        return f"a parameter of {name} is no <parameter=key>value</parameter>: {body[place:].strip()!r:.60}"
    return _call(name, pairs, tools)


@TOOL_CALLS.register("glm", marks=GLM, openings=BLOCK[:1], closing=BLOCK[1])
def glm(text: str, tools: Mapping[str, Schema]) -> Found:
    """Blocks `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>` of GLM-4.5 and later."""
    content, inside, rest = blocks(text, *BLOCK)
    found = [_glm_call(block, tools) for block in inside]
    return content.strip(), found if rest is None else [*found, "a <tool_call> is not closed"]


def _glm_call(block: str, tools: Mapping[str, Schema]) -> ToolCall | str:
    named = GLM_NAME.match(block)
    if named is None:
        return "the call does not begin with a name and <arg_key>"
    pairs, place = [], named.end()
    while (pair := GLM_PAIR.match(block, place)) is not None:
        pairs.append((pair[1].strip(), pair[2]))
        place = pair.end()
    if block[place:].strip():
        expected = "<arg_key>key</arg_key><arg_value>value</arg_value>"
        return f"an argument of {named[1]} is no {expected}: {block[place:].strip()!r:.60}"
    return _call(named[1], pairs, tools)


def _call(name: str, pairs: list[tuple[str, str]], tools: Mapping[str, Schema]) -> ToolCall | str:
    arguments = {}
    for key, text in pairs:
        try:
            arguments[key] = argument_value(text, parameter_kinds(tools, name, key))
        except ValueError as error:
            return f"the argument {key} of {name} is {error}"
    return ToolCall(name, arguments)
