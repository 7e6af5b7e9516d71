# ruff: noqa: RUF001  (bars of DeepSeek)
"""vLLM's parsers read the answers of the table; every difference is listed with its reason."""

import json
import logging
from functools import cache
from importlib.util import find_spec

import pytest

from rft.data.tool_calls import ToolCall
from tests.data.tool_calls.references import differences, differing_values, tokenizer
from tests.data.tool_calls.table import FOUND, LOOKED, TOOLS

# The parsers of calls and of thoughts for each form, and the token that ends its answers. vLLM has no parser of
# thoughts for Llama and none of calls for its built-in tools, and reads gpt-oss with a file of another host.
PARSERS = {
    "hermes": ("hermes", "deepseek_r1", "<|im_end|>"),
    "qwen_xml": ("qwen3_coder", "qwen3", "<|im_end|>"),
    "glm": ("glm45", "glm45", "<|observation|>"),
    "llama_json": ("llama3_json", None, "<|eot_id|>"),
    "mistral list": ("mistral", "mistral", "</s>"),
    "mistral": ("mistral", "mistral", "</s>"),
    "deepseek": ("deepseek_v3", "deepseek_r1", "<｜end▁of▁sentence｜>"),
    "deepseek 3.1": ("deepseek_v31", "deepseek_r1", "<｜end▁of▁sentence｜>"),
    "kimi": ("kimi_k2", "kimi_k2", "<|im_end|>"),
}
NO_JSON = "arguments that are no JSON"
BOTH = [LOOKED, FOUND]
# By design here: a thought calls nothing. For these parsers of vLLM a mark of calls ends a thought, so that a call that
# a thought drafts is made. vLLM knows no thoughts of Llama.
IN_THOUGHTS = {
    "inside of a thought": [LOOKED],
    "behind a thought": BOTH,
    "in a thought that does not end": [FOUND],
    "in a thought that the prompt opened": [LOOKED],
    "behind a thought that the prompt opened": BOTH,
    "in a thought of the prompt that does not end": [FOUND],
}
THOUGHTS = {
    (form, name): calls
    for form in ("qwen_xml", "glm", "llama_json", "mistral", "kimi")
    for name, calls in IN_THOUGHTS.items()
}
# The same; and vLLM reads the first list of an answer alone.
LISTS = {("mistral list", name): calls[:1] for name, calls in IN_THOUGHTS.items()}
CUT = {
    # Wrong there: a call without the argument that is cut.
    ("qwen_xml", "cut in the middle"): [ToolCall("find", {})],
    ("qwen_xml", "cut in the second call"): [LOOKED, ToolCall("find", {})],
    ("glm", "cut in the middle"): [ToolCall("find", {})],
    ("glm", "cut in the second call"): [LOOKED, ToolCall("find", {})],
    # Wrong there: a call whose arguments are the half of a JSON text.
    ("mistral", "cut in the middle"): NO_JSON,
    ("mistral", "cut in the second call"): NO_JSON,
    ("kimi", "cut in the middle"): NO_JSON,
    ("kimi", "cut in the second call"): NO_JSON,
    # By design here: calls that are whole are made, and the model reads why the other one is not. vLLM makes none.
    ("hermes", "cut in the second call"): [],
    ("llama_json", "cut in the second call"): [],
}
OTHERS = {
    # By design here: the call is the whole answer, as Llama's prompt asks for. vLLM takes any object of an answer.
    ("llama_json", "text before the call"): [FOUND],
    # Wrong there: an argument ends at a mark that it quotes.
    ("mistral", "an opening mark in an argument"): NO_JSON,
    ("mistral list", "an opening mark in an argument"): [],
}


VALUES = {
    # By design here: the model reads that the value is of another type. vLLM passes the text to the tool.
    'x of {"type": "integer"}': "x",
    'yes of {"type": "boolean"}': "yes",
    '{\'a\': 1} of {"type": "object"}': "{'a': 1}",
    # By design here: `nullable` allows null, as in the schemas that transformers makes; without a type, JSON is read.
    'null of {"type": "string", "nullable": true}': "null",
    "12 of {}": "12",
}
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")


@cache
def parser(form, thinks):
    from vllm.parser import ParserManager

    calls, thoughts, end = PARSERS[form]
    made = tokenizer(form, end)
    return made, ParserManager.get_parser(calls, thoughts if thinks else None, enable_auto_tools=True)


def request(tools):
    import transformers.models.auto.modeling_auto  # noqa: F401  (before vLLM, whose imports are in a circle else)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = [{"role": "user", "content": "q"}]
    return ChatCompletionRequest(messages=asked, model="m", tools=[*tools.values()], tool_choice="auto")


def parsed(form, text, tools, thinks=False, opened=None):
    asked = request(tools)
    made, kind = parser(form, thinks)
    parse = kind(made, asked.tools)
    if opened:
        parse.set_prompt_token_ids(made(f"{opened}\n").input_ids)
    _, _, calls = parse.parse(text, asked, True, made(text).input_ids)
    return [ToolCall(call.name, json.loads(call.arguments)) for call in calls or []]


def read(form, case):
    try:
        return parsed(form, case.text, TOOLS, case.thinks, case.opened)
    except json.JSONDecodeError:
        return NO_JSON


@pytest.fixture
def silent():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@needs_vllm
@pytest.mark.slow
def test_every_difference_has_a_reason(silent):
    assert differences([*PARSERS], read) == THOUGHTS | LISTS | CUT | OTHERS


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize("form", ["qwen_xml", "glm"])
def test_every_value_of_another_type_has_a_reason(form, silent):
    found = differing_values(form, lambda text, tools: [call.arguments for call in parsed(form, text, tools)])
    assert found == VALUES
