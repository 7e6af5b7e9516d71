# ruff: noqa: RUF001  (bars of DeepSeek)
"""vLLM's parsers read the answers of the table; every difference is listed with its reason."""

import json
import logging
from functools import cache
from importlib.util import find_spec

import pytest

from rft.data.tool_calls import ToolCall
from tests.data.tool_calls.references import differences, tokenizer
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


@cache
def parser(form, thinks):
    from vllm.parser import ParserManager

    calls, thoughts, end = PARSERS[form]
    made = tokenizer(form, end)
    return made, ParserManager.get_parser(calls, thoughts if thinks else None, enable_auto_tools=True)


@cache
def request():
    import transformers.models.auto.modeling_auto  # noqa: F401  (before vLLM, whose imports are in a circle else)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    asked = [{"role": "user", "content": "q"}]
    return ChatCompletionRequest(messages=asked, model="m", tools=[*TOOLS.values()], tool_choice="auto")


def read(form, case):
    asked = request()
    made, kind = parser(form, case.thinks)
    parse = kind(made, asked.tools)
    if case.opened:
        parse.set_prompt_token_ids(made(f"{case.opened}\n").input_ids)
    try:
        _, _, calls = parse.parse(case.text, asked, True, made(case.text).input_ids)
        return [ToolCall(call.name, json.loads(call.arguments)) for call in calls or []]
    except json.JSONDecodeError:
        return "arguments that are no JSON"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.slow
def test_every_difference_has_a_reason():
    logging.disable(logging.CRITICAL)
    try:
        found = differences([*PARSERS], read)
    finally:
        logging.disable(logging.NOTSET)
    assert found == THOUGHTS | LISTS | CUT | OTHERS
