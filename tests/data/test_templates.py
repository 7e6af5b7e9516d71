"""Templates that are built in write what the models read that they are called after."""

import pytest

from rft.data.encode import Encoder
from rft.data.templates import FOLDER, ChatTemplate
from tests.data import chat_texts as chats
from tests.data.test_masks import CALLING, LED, SCHEMA, SYSTEM, TWO, tokenizer, user

BUILT_IN = {"chatml": chats.CHATML, "llama3": chats.LLAMA3, "mistral": chats.MISTRAL, "gemma": chats.GEMMA}


def test_there_is_a_text_for_every_name():
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(BUILT_IN)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_conversation_is_what_the_models_own_template_makes_of_it(name):
    own, made = ChatTemplate(tokenizer(BUILT_IN[name]), "chat"), ChatTemplate(tokenizer(BUILT_IN[name]), name)
    for messages, answering in ((TWO[:1], True), (TWO[:2], False), (TWO[:3], True), (TWO, False)):
        assert made.render(messages, None, answering) == own.render(messages, None, answering)


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
    with pytest.raises(ValueError, match=r"data\.template=chatm: there is no such file.*did you mean chatml\?"):
        Encoder(tokenizer(chats.CHATML), "chatm", None)
    with pytest.raises(ValueError, match=r"data\.template=llama3 ends an answer with '<\|eot_id\|>', which is no"):
        Encoder(tokenizer(chats.CHATML), "llama3", None)
    bad = {"{% for %}": "Expected", "{{ raise_exception('no user') }}": "no user", "{{ 1 + 'a' }}": "unsupported"}
    for text, message in bad.items():
        (tmp_path / "bad.jinja").write_text(text)
        with pytest.raises(ValueError, match=rf"bad\.jinja cannot render a conversation of user: .*{message}"):
            Encoder(tokenizer(chats.CHATML), str(tmp_path / "bad.jinja"), None)
