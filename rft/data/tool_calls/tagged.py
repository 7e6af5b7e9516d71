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
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=[^>\n]+>|\Z))", re.DOTALL)
QWEN = (*BLOCK, "<function=", "</function>", "<parameter=", "</parameter>")
GLM_CALL = re.compile(rf"\s*({NAME})\s*((?:<arg_key>.*)?)", re.DOTALL)
GLM_PAIR = re.compile(r"\s*<arg_key>([^<]+)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL)
GLM = (*BLOCK, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@TOOL_CALLS.register("qwen_xml", marks=QWEN, openings=BLOCK[:1], closing=BLOCK[1])
def qwen_xml(text: str, tools: Mapping[str, Schema]) -> Found:
    """Blocks `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    Qwen3-Coder, Qwen3.5 and Nemotron 3 write them, with a line break around each value.
    """
    return _calls(
        text, tools, FUNCTION, PARAMETER, "<function=name> ... </function>", "<parameter=key>value</parameter>"
    )


@TOOL_CALLS.register("glm", marks=GLM, openings=BLOCK[:1], closing=BLOCK[1])
def glm(text: str, tools: Mapping[str, Schema]) -> Found:
    """Blocks `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>` of GLM-4.5 and later."""
    pair = "<arg_key>key</arg_key><arg_value>value</arg_value>"
    return _calls(text, tools, GLM_CALL, GLM_PAIR, f"name{pair}", pair)


def _calls(
    text: str, tools: Mapping[str, Schema], call: re.Pattern[str], pair: re.Pattern[str], form: str, pair_form: str
) -> Found:
    """The content beside blocks, and the call of each.

    Args:
        call: matches a block; its groups are the name of the tool and the text of the pairs.
        pair: matches a pair; its groups are the key and the text of the value.
        form, pair_form: how both are written, for reasons.
    """
    content, inside, rest = blocks(text, *BLOCK)
    found: list[ToolCall | str] = []
    for block in inside:
        named = call.fullmatch(block)
        found.append(f"the call is no {form}" if named is None else _call(named[1], named[2], pair, pair_form, tools))
    return content.strip(), found if rest is None else [*found, "a <tool_call> is not closed"]


def _call(name: str, body: str, pair: re.Pattern[str], pair_form: str, tools: Mapping[str, Schema]) -> ToolCall | str:
    arguments, place = {}, 0
    while (found := pair.match(body, place)) is not None:
        key, place = found[1].strip(), found.end()
        try:
            arguments[key] = argument_value(found[2], parameter_kinds(tools, name, key))
        except ValueError as error:
            return f"the argument {key} of {name} is {error}"
    rest = body[place:].strip()
    return f"an argument of {name} is no {pair_form}: {rest!r:.60}" if rest else ToolCall(name, arguments)
