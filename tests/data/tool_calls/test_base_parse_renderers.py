# ruff: noqa: RUF001  (bars of DeepSeek)
"""The parsers of the package renderers read the answers of the table; every difference is listed with its reason."""

from functools import cache

import pytest

pytest.importorskip("renderers")

from renderers import config_from_name, create_renderer
from renderers.base import ToolCallParseStatus
from renderers.parsing import parse_gpt_oss

from rft.data.tool_calls import ToolCall
from tests.data.tool_calls.references import differences, differing_values, tokenizer
from tests.data.tool_calls.table import FOUND, LOOKED, TOOLS

# The renderer of each form, and the token that ends its answers. The package has none for the others.
RENDERERS = {
    "hermes": ("qwen3", "<|im_end|>"),
    "qwen_xml": ("qwen3.5", "<|im_end|>"),
    "glm": ("glm-4.5", "<|observation|>"),
    "llama_json": ("llama-3", "<|eot_id|>"),
    "deepseek": ("deepseek-v3", "<｜end▁of▁sentence｜>"),
    "kimi": ("kimi-k2", "[EOS]"),
    "harmony": ("gpt-oss", "<|return|>"),
}
SCHEMAS = [tool["function"] for tool in TOOLS.values()]
MARKS = ("return", "call", "start", "end", "channel", "message", "constrain")

BOTH = [LOOKED, FOUND]
# By design here: a thought calls nothing. The package ends a thought that is not closed at a mark of calls.
OPEN_THOUGHTS = {
    (form, name): [FOUND]
    for form in ("hermes", "qwen_xml", "glm", "kimi")
    for name in ("in a thought that does not end", "in a thought of the prompt that does not end")
}
# The same in the package's renderer of GLM, which ends a closed thought, too, at the first mark of calls in it.
GLM_THOUGHTS = {
    ("glm", "inside of a thought"): [LOOKED],
    ("glm", "behind a thought"): BOTH,
    ("glm", "in a thought that the prompt opened"): [LOOKED],
    ("glm", "behind a thought that the prompt opened"): BOTH,
}
# By design here: several calls of Llama are read, with `;` between them, and calls behind and in thoughts as in every
# format. The package reads an answer that is one call, and knows no thoughts of Llama.
LLAMA = {
    ("llama_json", "parallel"): [],
    ("llama_json", "an opening mark in an argument"): [],  # it has two calls
    ("llama_json", "cut in the second call"): [],
    ("llama_json", "behind a thought"): [],
    ("llama_json", "behind a thought that the prompt opened"): [],
    ("llama_json", "in a thought of the prompt that does not end"): [FOUND],
}


VALUES = {
    # By design here: Python's spelling of a boolean is one, as the template of Qwen3.5 writes it, and a text without a
    # type is a text. The package marks such calls as malformed.
    'True of {"type": "boolean"}': None,
    "x of {}": None,
    # Wrong there: a value of a type that the schema does not allow, instead of the text.
    '1 of {"enum": ["1", "2"]}': 1,
    '{"a": 1} of {"anyOf": [{"type": "string"}, {"type": "integer"}]}': {"a": 1},
    # By design here: `nullable` allows null, as in the schemas that transformers makes.
    'null of {"type": "string", "nullable": true}': "null",
}


@cache
def parser(form):
    name, end = RENDERERS[form]
    made = tokenizer(form, end)
    if form == "harmony":  # its renderer reads a file of another host; the parser is a function
        ids = {f"{mark}_id": made.convert_tokens_to_ids(f"<|{mark}|>") for mark in MARKS}
        return made, lambda tokens, **_: parse_gpt_oss(made, tokens, **ids)
    return made, create_renderer(made, config_from_name(name)).parse_response


def read(form, case):
    made, parse = parser(form)
    tokens = made(("<|start|>assistant" if form == "harmony" else "") + case.text).input_ids
    found = parse(tokens, tools=SCHEMAS, prompt_ids=made(f"{case.opened or '<|im_start|>'}\n").input_ids)
    return [ToolCall(call.name, call.arguments) for call in found.tool_calls if call.status is ToolCallParseStatus.OK]


def test_every_difference_has_a_reason():
    assert differences([*RENDERERS], read) == OPEN_THOUGHTS | GLM_THOUGHTS | LLAMA


@pytest.mark.parametrize("form", ["qwen_xml", "glm"])
def test_every_value_of_another_type_has_a_reason(form):
    made, parse = parser(form)

    def arguments(text, tools):
        found = parse(made(text).input_ids, tools=[tool["function"] for tool in tools.values()], prompt_ids=[0])
        return [call.arguments for call in found.tool_calls if call.status is ToolCallParseStatus.OK]

    assert differing_values(form, arguments) == VALUES
