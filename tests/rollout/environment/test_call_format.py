"""The calls of answers in a run: marks that are special tokens, thoughts, and what a run says about calls."""

import logging

import pytest

from rft.batch.trajectory import Finish, Segment
from rft.data.encode.encoder import Encoder
from rft.data.tool_calls import TOOL_CALLS, ToolCall
from rft.rollout.answers import Answer
from rft.rollout.environment.call_format import ANSWERS, CALLS, CallFormat, CallNotices, Read
from tests.data import chat_texts as chats
from tests.data.encode.test_masks import TWO, tokenizer

TOOLS = {"f": {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}}
CALL = ToolCall("f", {"x": 1})


def reader(name, special=True, opens=""):
    """A format, an encoder and its tokenizer.

    Args:
        special: the marks of the format are special tokens.
        opens: the end of the generation prompt.
    """
    format, own = TOOL_CALLS.build({"name": name}, "k"), tokenizer(chats.CHATML)
    own.add_special_tokens({"additional_special_tokens": list(format.facts.marks) if special else []})
    own.chat_template = chats.CHATML.replace("assistant\n'", f"assistant\n{opens}'")
    encoder = Encoder(own, "chat", None)
    return CallFormat(format, encoder), encoder, own


def answer(own, *parts):
    """An answer of texts, which have no special tokens, and of the names of special tokens."""
    special, ids = {token.content for token in own.added_tokens_decoder.values() if token.special}, []
    for part in parts:
        plain = [token for letter in part for token in own(letter, add_special_tokens=False).input_ids]
        ids += [own.convert_tokens_to_ids(part)] if part in special else plain
    text = own.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Answer([Segment(ids, True, [-1.0] * len(ids), [0] * len(ids))], Finish("stop", text))


def read(name, *parts, stop=(), special=True):
    format, encoder, own = reader(name, special)
    return format.read(encoder.prompt({"prompt": TWO[:1]}), answer(own, *parts), TOOLS, stop)


def test_marks_that_are_special_tokens_stay_in_the_text():
    found = read("mistral", "So", "[TOOL_CALLS]", "f", "[ARGS]", '{"x": 1}', "<|im_end|>")
    assert found == Read('So[TOOL_CALLS]f[ARGS]{"x": 1}', "So", [CALL])
    section = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>")
    found = read("kimi_k2", *section, '{"x": 1}', "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>")
    assert found.calls == [CALL] and found.content == "" and found.text.startswith(section[0])


def test_an_answer_that_spells_a_mark_in_other_tokens_calls_nothing():
    format, encoder, own = reader("mistral")
    spelled = answer(own, "[TOOL", "_CALLS]f", '{"x": 1}')
    assert "[TOOL_CALLS]f" in spelled.finish.text
    found = format.read(encoder.prompt({"prompt": TWO[:1]}), spelled, TOOLS, ())
    assert found == Read(spelled.finish.text, spelled.finish.text, [])


def test_the_text_ends_before_a_stop_string():
    found = read("mistral", "[TOOL_CALLS]", 'f{"x": 1}', "STOP", "more", stop=["STOP"])
    assert found.calls == [CALL] and found.text == '[TOOL_CALLS]f{"x": 1}'


def test_channels_are_no_part_of_a_text_without_calls():
    parts = ("<|channel|>", "analysis", "<|message|>", "2+2", "<|end|>", "<|start|>", "assistant")
    final = ("<|channel|>", "final", "<|message|>", "It is 4.", "<|return|>")
    assert read("harmony", *parts, *final) == Read("It is 4.", "It is 4.", [])
    call = ("<|channel|>", "commentary to=functions.f ", "<|constrain|>", "json", "<|message|>", '{"x": 1}', "<|call|>")
    assert read("harmony", *parts, *call).calls == [CALL]


@pytest.mark.parametrize("thought", ["<think>{}</think>", "<think>{}"])
def test_a_thought_calls_nothing(thought):
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    text = thought.format(call)
    found = read("hermes", text, special=False)
    assert found == Read(text, text, [])
    assert read("hermes", text + call, special=False).calls == ([CALL] if "</think>" in thought else [])


def test_the_thought_that_a_prompt_opens_calls_nothing():
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    format, encoder, own = reader("hermes", False, "<think>\n")
    prompt = encoder.prompt({"prompt": TWO[:1]})
    for text, calls in ((f"I try {call}", []), (f"I try {call}</think>{call}", [CALL]), (f"</think>{call}", [CALL])):
        assert format.read(prompt, answer(own, text), TOOLS, ()).calls == calls


def test_answers_without_calls_are_said_once(caplog):
    caplog.set_level(logging.WARNING)
    plain, called = Read("no call\x1b[31m", "", []), Read("", "", [CALL])
    never, once = CallNotices(), CallNotices()
    once.answered(called)
    for number in range(3 * ANSWERS):
        never.answered(plain)
        once.answered(plain)
        assert len(caplog.records) == (number + 1 >= ANSWERS)
    said = caplog.records[0].getMessage()
    assert said.startswith(f"The first {ANSWERS} answers to prompts with tools call none.") and "\\x1b" in said


def test_a_tool_that_always_fails_is_said_once(caplog):
    caplog.set_level(logging.WARNING)
    notices = CallNotices()
    notices.used("works", None)
    for _ in range(3 * CALLS):
        notices.used("works", "no")
        notices.used("fails", "no such file")
    [record] = caplog.records
    assert record.getMessage() == f"The first {CALLS} calls of the tool 'fails' failed. The last error: 'no such file'"
