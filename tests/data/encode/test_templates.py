"""Templates that are built in write what the models read that they are called after."""

import json
import re
from itertools import compress

import pytest

from rft.data.encode.encoder import Encoder
from rft.data.encode.templates import FOLDER, ChatTemplate
from tests.data import chat_texts as chats
from tests.data.encode.test_masks import CALLING, LED, SCHEMA, SYSTEM, THINKING, TWO, said, tokenizer, trained, user

BUILT_IN = {"chatml": chats.CHATML, "llama3": chats.LLAMA3, "mistral": chats.MISTRAL, "gemma": chats.GEMMA}


def test_there_is_a_text_for_every_name():
    """Beside `turns`, which no published model has."""
    assert {path.stem for path in FOLDER.glob("*.jinja")} == {*BUILT_IN, "turns"}


def test_turns_are_texts_one_behind_the_other():
    made = ChatTemplate(tokenizer(chats.CHATML), "turns")
    said = [("user", "a="), ("assistant", "?b"), ("tool", "c"), ("assistant", "d"), ("user", "e")]
    text = made.render([{"role": role, "content": content} for role, content in said], None, True)
    assert text == "a=?b<|im_end|>c=d<|im_end|>e"


def test_a_template_that_takes_parts_alone_gets_texts_as_parts():
    """Templates of some vision models write nothing of a content that is a text."""
    content = "+ message['content'] +"
    parts = "}}{% for part in message['content'] if part.type == 'text' %}{{ part.text }}{% endfor %}{{"
    made = tokenizer(chats.CHATML)
    plain = ChatTemplate(made, "chat")
    expected = plain.render(LED, None, True), plain.prompt(TWO[:2], None), plain.ends
    made.chat_template = chats.CHATML.replace(content, parts)
    whole = ChatTemplate(made, "chat")
    assert (whole.render(LED, None, True), whole.prompt(TWO[:2], None), whole.ends) == expected
    assert whole.takes_parts and parts in made.chat_template
    made.chat_template = chats.CHATML.replace(content, "+")
    with pytest.raises(ValueError, match=r"^data\.template=chat does not write the content of a message"):
        ChatTemplate(made, "chat")


def test_an_answer_without_an_end_of_its_own_ends_with_the_mark_of_the_next_message():
    """As in GLM-4.5, where the mark of a result ends a call."""
    made = tokenizer(chats.CHATML)
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|tool|>"]})
    made.chat_template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
        "{% for call in message.tool_calls or [] %}({{ call.function.arguments | tojson }}){% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    encoder = Encoder(made, "chat", None)
    assert encoder.end == made.convert_tokens_to_ids("<|user|>")
    assert encoder.ends == (encoder.end, made.convert_tokens_to_ids("<|tool|>"))
    assert trained(encoder, {"response": [*CALLING, *TWO[2:]]}) == [
        '({"a": 2, "b": 2})<|tool|>',
        "It is 4.<|user|>",
        "It is 6.<|user|>",
    ]
    for response in ("It is 4.", [TWO[1]], "It is 4.<|user|>"):
        ids, _ = encoder.example({"prompt": TWO[:1], "response": response})
        assert made.decode(ids) == "<|user|>What is 2+2?<|assistant|>It is 4.<|user|>"


def test_a_call_trains_without_the_empty_thought_that_its_prompt_ends_with():
    encoder = Encoder(tokenizer(chats.QWEN3), "chat", None, arguments={"enable_thinking": False})
    call, answer = trained(encoder, {"response": CALLING})
    assert call.startswith("<tool_call>") and answer == "It is 4.<|im_end|>"
    ids, trains = encoder.example({"response": CALLING})
    assert encoder.decode(ids[: trains.index(True)]).endswith("<|im_start|>assistant\n")
    with pytest.raises(ValueError, match=r"or the path of a template that keeps answers$"):
        encoder.example({"response": [TWO[0], THINKING[1]]})


def test_a_refusal_names_the_argument_with_which_plain_answers_train():
    """The prompt begins a thought, and an answer without one has an empty thought in its place, as in Nemotron 3."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{{ '<think>\n' if enable_thinking is not defined or enable_thinking else '<think></think>' }}{% endif %}"
    )
    chats.SPECIAL[template] = chats.SPECIAL[chats.CHATML]
    cure = r"; for answers without thoughts set \+data\.template_arguments\.enable_thinking=false$"
    for arguments in ({}, {"enable_thinking": True}):
        with pytest.raises(ValueError, match=cure):
            Encoder(tokenizer(template), "chat", None, arguments=arguments).example({"response": TWO})
    encoder = Encoder(tokenizer(template), "chat", None, arguments={"enable_thinking": False})
    assert trained(encoder, {"response": TWO}) and encoder.chat.cure == ""
    assert Encoder(tokenizer(chats.QWEN3), "chat", None).chat.cure == ""  # its plain answers train


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_conversation_is_what_the_models_own_template_makes_of_it(name):
    own, made = ChatTemplate(tokenizer(BUILT_IN[name]), "chat"), ChatTemplate(tokenizer(BUILT_IN[name]), name)
    for messages, answering in ((TWO[:1], True), (TWO[:2], False), (TWO[:3], True), (TWO, False)):
        assert made.render(messages, None, answering) == own.render(messages, None, answering)


# What a template writes of a turn that calls tools, and the end token of the run beside that of plain answers.
CALLS = {
    "(f)<|call|>": "<|call|>",
    "(f)<|call|>\n": "<|call|>",
    "(f)<|im_end|>": None,
    "(f)<|call|>, and then": None,  # no engine may stop within a turn
    "<think></think>(f)": None,
    "<think></think>": None,  # a plain answer has it behind a thought
    "": None,
}


@pytest.mark.parametrize(("turn", "end"), CALLS.items())
def test_turns_that_call_tools_end_with_a_token_that_stands_nowhere_else(turn, end):
    made = _ending_calls_with(turn)
    encoder = Encoder(made, "chat", None)
    assert made.convert_ids_to_tokens(encoder.ends) == ["<|im_end|>", *([end] if end else [])]


def test_a_token_behind_each_of_two_calls_does_not_end_a_turn():
    twice = "{% for call in message.tool_calls %}(f)<|call|>{% endfor %}"
    for turn, ends in ((twice, 1), (twice + "<|calls|>", 2)):
        assert len(Encoder(_ending_calls_with(turn), "chat", None).ends) == ends


def test_the_end_of_a_call_is_found_whatever_form_its_arguments_have():
    refused = "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    for turn in ("{{ message.tool_calls[0].function.arguments + '' }}", refused):
        made = _ending_calls_with(f"(f){turn}<|call|>")
        assert made.convert_ids_to_tokens(Encoder(made, "chat", None).ends) == ["<|im_end|>", "<|call|>"]


def _ending_calls_with(turn):
    """A tokenizer whose template writes this of a turn that calls tools."""
    made = tokenizer(chats.CHATML)
    made.add_special_tokens({"additional_special_tokens": ["<|call|>", "<|calls|>", "<think>", "</think>"]})
    made.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}:{% if message.tool_calls %}" + turn + "{% else %}"
        "{% if message.thinking %}<think>{{ message.thinking }}</think>{% endif %}{{ message.content }}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    return made


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_a_system_message_has_its_place(name):
    own, made = ChatTemplate(tokenizer(BUILT_IN[name]), "chat"), ChatTemplate(tokenizer(BUILT_IN[name]), name)
    assert made.render(LED, None, False) == own.render(LED, None, False)


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_a_system_message_without_a_turn_stands_in_the_first_question_for_good(name):
    made = tokenizer(BUILT_IN[name])
    inside = [user(f"Add.\n\n{TWO[0]['content']}"), *TWO[1:]]
    template = ChatTemplate(made, name)
    assert template.render(LED, None, False) == template.render(inside, None, False)
    ids, trains = Encoder(made, name, "Add.").example({"response": TWO})
    assert ids[: trains.index(True)] == Encoder(made, name, None).prompt({"prompt": inside[:1]})
    with pytest.raises(ValueError, match=f"data.template={name} cannot render a conversation of user, system"):
        template.render([TWO[0], SYSTEM], None, True)


def test_a_role_of_several_lines_is_one_line_in_the_message():
    made = tokenizer(chats.CHATML)
    made.chat_template = chats.CHATML + "{{ raise_exception('no ' + messages[0].role) if '`' in messages[0].role }}"
    with pytest.raises(ValueError, match=r"a conversation of ``` \[red\], user: no ``` \[red\]; correct the") as raised:
        ChatTemplate(made, "chat").render([{"role": "```\n[red]", "content": ""}, TWO[0]], None, True)
    assert "\n" not in str(raised.value)


def test_chatml_writes_tools_as_qwen_does():
    own = ChatTemplate(tokenizer(chats.QWEN25), "chat")
    made = ChatTemplate(tokenizer(chats.QWEN25), "chatml")
    assert made.takes_tools and own.takes_tools
    for messages, answering in (([SYSTEM, *CALLING], False), ([SYSTEM, *CALLING[:3]], True), ([SYSTEM, TWO[0]], True)):
        assert made.render(messages, [SCHEMA], answering) == own.render(messages, [SCHEMA], answering)
    assert not ChatTemplate(tokenizer(chats.LLAMA3), "llama3").takes_tools


def test_a_template_in_a_file(tmp_path):
    (tmp_path / "mine.jinja").write_text(chats.LLAMA3)
    made = tokenizer(chats.LLAMA3)
    made.chat_template = None
    row = {"response": TWO}
    expected = Encoder(tokenizer(chats.LLAMA3), "chat", None).example(row)
    assert Encoder(made, str(tmp_path / "mine.jinja"), None).example(row) == expected
    assert made.chat_template == chats.LLAMA3  # as checkpoints are to have it


def test_bad_templates_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"data\.template=chatm: no such file.*did you mean chatml\?"):
        Encoder(tokenizer(chats.CHATML), "chatm", None)
    with pytest.raises(ValueError, match=r"data\.template=llama3 ends an answer with '<\|eot_id\|>', which is no"):
        Encoder(tokenizer(chats.CHATML), "llama3", None)
    bad = {"{% for %}": "Expected", "{{ raise_exception('no user') }}": "no user", "{{ 1 + 'a' }}": "unsupported"}
    for text, message in bad.items():
        (tmp_path / "bad.jinja").write_text(text)
        with pytest.raises(ValueError, match=rf"bad\.jinja cannot render a conversation of user: .*{message}"):
            Encoder(tokenizer(chats.CHATML), str(tmp_path / "bad.jinja"), None)


def test_arguments_reach_the_prompt_and_the_masks():
    made = tokenizer(chats.QWEN3)
    plain, quick = Encoder(made, "chat", None), Encoder(made, "chat", None, arguments={"enable_thinking": False})
    thought = "<think>\n\n</think>\n\n"
    asked = {"prompt": TWO[:1]}
    prompt = made.decode(plain.prompt(asked)) + thought
    assert made.decode(quick.prompt(asked)) == prompt
    ids, trains = quick.example(asked | {"response": TWO[1:2]})
    answer = f"{TWO[1]['content']}<|im_end|>"
    assert made.decode(ids).startswith(prompt) and made.decode(list(compress(ids, trains))) == answer
    ids, trains = plain.example(asked | {"response": TWO[1:2]})
    assert made.decode(list(compress(ids, trains))) == thought + answer


def test_an_argument_that_the_template_does_not_read_is_refused(tmp_path):
    made = tokenizer(chats.QWEN3)
    for name in ("enable_thinkin", "tools", "bos_token"):
        with pytest.raises(
            ValueError,
            match=rf"data\.template_arguments\.{name}: data\.template=chat does not read it.*\(it reads: enable_thi",
        ):
            Encoder(made, "chat", None, arguments={name: True})
    with pytest.raises(ValueError, match=r"data\.template_arguments has no effect with data\.template=none"):
        Encoder(made, "none", None, arguments={"enable_thinking": True})
    with pytest.raises(ValueError, match=r"data\.template=chatml does not read it \(it reads: none\)"):
        Encoder(made, "chatml", None, arguments={"enable_thinking": True})
    marked = "{% generation %}{{ messages[0].content }}{{ style | default('x') }}{% endgeneration %}"
    (tmp_path / "mine.jinja").write_text(marked + "{% if loud %}!{% endif %}{{ eos_token }}")
    encoder = Encoder(made, str(tmp_path / "mine.jinja"), None, arguments={"loud": True, "style": "y"})
    assert made.decode(encoder.prompt({"prompt": TWO[:1]})) == f"{TWO[0]['content']}y!<|im_end|>"


@pytest.mark.parametrize("template", [chats.QWEN3, chats.DEEPSEEK, chats.HARMONY])
def test_arguments_of_a_call_are_an_object_or_its_json_text(template):
    """OpenAI's format has the text. The template of DeepSeek takes texts alone, the others write an object."""
    encoder = Encoder(tokenizer(template), "chat", None)
    given = {"x": ["é", {"y": None}], "n": 1.5}
    whole = [
        trained(encoder, {"response": calling(arguments)})
        for arguments in (given, json.dumps(given, ensure_ascii=False))
    ]
    assert whole[0] == whole[1] and '{"x": ["é", {"y": null}], "n": 1.5}' in whole[0][0]
    assert trained(encoder, {"response": calling(None)}) == trained(encoder, {"response": calling({})})


@pytest.mark.parametrize("text", ["{", "[1]", "3", r'{"x": "\ud83d"}', '{"x": NaN}'])
def test_arguments_that_are_no_json_object_are_refused(text):
    with pytest.raises(ValueError, match=rf"the arguments of a call of f are no JSON.*{re.escape(repr(text))}"):
        Encoder(tokenizer(chats.QWEN3), "chat", None).example({"response": calling(text)})


def test_calls_that_the_template_leaves_out_are_refused():
    encoder = Encoder(tokenizer(chats.ZEPHYR), "chat", None)
    with pytest.raises(ValueError, match=r"^data\.template=chat does not write calls of tools, and a message"):
        encoder.example({"response": calling({})})


def calling(arguments):
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [TWO[0], said("", tool_calls=[call]), {"role": "tool", "content": "4"}, TWO[1]]
