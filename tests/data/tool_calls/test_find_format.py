"""The format that reads the calls which a chat template renders: found, and the same calls for any arguments."""

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.batch.thoughts import MARKS
from rft.data.encode.templates import ChatTemplate
from rft.data.tool_calls import TOOL_CALLS, ToolCall, assistant_message, calls_of, find_format
from tests.data import chat_texts as chats
from tests.data.encode.test_masks import tokenizer, user
from tests.data.tool_calls.table import schema
from tests.rollout.environment import trl_templates as trl

TURNS = """\
{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content }}CALLS\
{{ '</s>' }}{% endif %}{% endfor %}"""
MISTRAL = TURNS.replace("CALLS", """\
{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}\
{% endfor %}""")  # fmt: skip
KIMI = TURNS.replace("CALLS", """\
{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>\
{{ 'functions.' + c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}\
<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}""")  # fmt: skip
OWN = TURNS.replace("CALLS", "{% for c in m.tool_calls or [] %}{{ '!' + c.function.name }}{% endfor %}")

# Of TRL's templates. Those that are not named render no calls, or none beside a content.
FORMATS = {
    "deepseek": ["deepseekv3"],
    "glm": ["glm4moe"],
    "harmony": ["gptoss"],
    "hermes": ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"],
    "llama_json": ["llama3_1", "llama3_2"],
    "qwen_xml": [
        *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
        *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
    ],
}
# They render calls in a way of their own, which no format reads: call:name{key:value} between marks, calls in Python's
# syntax between marks, and XML of a channel for each call.
OTHERS = {
    *("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
    *("lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl", "lfm2_v2"),
    "muse_glimmer",
}
BY_NAME = {name: format for format, names in FORMATS.items() for name in names}
ONE_CALL = ("harmony", "llama_json")  # their templates render one call of an answer


@cache
def chat(name):
    return ChatTemplate(trl.tokenizer(name), "chat")


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (chats.QWEN25, "hermes"),
        (chats.QWEN3, "hermes"),
        (chats.DEEPSEEK, "deepseek"),
        (chats.HARMONY, "harmony"),
        (chats.PHI3, None),
        (MISTRAL, "mistral"),
        (KIMI, "kimi_k2"),
        (OWN, None),
        (TURNS.replace("CALLS", ""), None),
    ],
)
def test_the_format_of_a_template(template, format):
    made = tokenizer(chats.PHI3 if template.startswith("{% for m in") else template)
    made.chat_template = template
    made.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "<|tool_call_begin|>", "</s>"]})
    assert find_format(ChatTemplate(made, "chat")) == format


class CountingTemplate(ChatTemplate):
    """Counts what it renders."""

    rendered = 0

    def render(self, *given, **options):
        self.rendered += 1
        return super().render(*given, **options)


def test_the_answers_of_a_template_are_rendered_once_for_all_formats():
    first, second = (CountingTemplate(tokenizer(template), "chat") for template in (chats.HARMONY, chats.QWEN3))
    for made, format in ((first, "harmony"), (second, "hermes")):
        before = made.rendered
        assert find_format(made) == format
        once = made.rendered
        assert find_format(made) == format and made.rendered == once
        assert once - before <= 9, "a prompt, a question and an answer with one call, another, and both"


def test_a_template_that_renders_one_call_differently_has_no_format():
    """The last mark of several calls is missing."""
    made = tokenizer(chats.PHI3)
    made.chat_template = KIMI.replace("<|tool_call_end|>", "{{ '<|tool_call_end|>' if loop.last }}")
    assert find_format(ChatTemplate(made, "chat")) is None


@trl.needs_trl
def test_the_formats_of_the_templates_of_trl():
    found = {name: find_format(chat(name)) for name in trl.NAMES}
    training = {f"{name}_training": format for name, format in BY_NAME.items() if f"{name}_training" in trl.NAMES}
    assert {name: format for name, format in found.items() if format} == BY_NAME | training


@trl.needs_trl
def test_a_template_of_trl_without_a_format_renders_no_calls_or_has_its_own_form():
    message = assistant_message("", [ToolCall("look", {})])
    rendering = {name for name in trl.NAMES if name.removesuffix("_training") not in BY_NAME if renders(name, message)}
    assert rendering == OTHERS | {f"{name}_training" for name in OTHERS if f"{name}_training" in trl.NAMES}


def renders(name, message):
    try:
        return "look" in chat(name).render([user("q"), message], None, False)
    except ValueError:
        return False


NAMES = st.from_regex(r"[a-z][a-zA-Z0-9_-]{0,9}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12)  # no special token
NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
CALLS = st.lists(
    st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=3)),
    min_size=1,
    max_size=2,
    unique_by=lambda call: call.name,
)
KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def tools_of(calls):
    """Tools whose schemas state the types of the arguments of these calls."""
    return {
        call.name: schema(call.name, {key: {"type": KINDS[type(value)]} for key, value in call.arguments.items()})
        for call in calls
    }


def sampled(name, format, calls):
    """The text of an answer whose tokens are those that the template renders, and the thought that the prompt opens.

    Special tokens are left out, but for those of the format and of thoughts.
    """
    template, message, asked = chat(name), assistant_message("", calls), [user("q")]
    if name == "deepseekv3":  # it takes the text of the arguments
        for call in message["tool_calls"]:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    tools = [*tools_of(calls).values()] if template.takes_tools else None
    prompt, whole = template.prompt(asked, tools), template.render([*asked, message], tools, False)
    continues = whole.startswith(prompt)
    turn = whole.removeprefix(prompt if continues else template.render(asked, tools, False))
    kept = {*MARKS, *MARKS.values(), *TOOL_CALLS.build({"name": format}, "name").facts.marks}
    special = {number for number, token in template.tokenizer.added_tokens_decoder.items() if token.content not in kept}
    ids = template.tokenizer(turn, add_special_tokens=False).input_ids
    opened = "<think>" if continues and prompt.rstrip().endswith("<think>") else None
    return template.tokenizer.decode([token for token in ids if token not in special]), opened


@trl.needs_trl
@pytest.mark.parametrize("name", [name for name in trl.NAMES if name.removesuffix("_training") in BY_NAME])
@settings(max_examples=10, deadline=None, derandomize=True)
@given(calls=CALLS)
def test_the_calls_of_a_rendered_answer_are_the_calls(name, calls):
    format = BY_NAME[name.removesuffix("_training")]
    calls = calls[:1] if format in ONE_CALL else calls
    text, opened = sampled(name, format, calls)
    _, found = calls_of(text, tools_of(calls), TOOL_CALLS.build({"name": format}, "name"), opened)
    assert found == calls
    assert repr(found) == repr(calls), "true is not 1, and 1.0 is not 1"
