"""Characters for which a tokenizer has no token: said for prompts, refused in answers."""

import logging

import pytest

from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.data.given.supervised import supervised_row
from rft.data.rows.lazy import PlacedRows

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[a:{% endif %}"
)
NUL, EMOJI, SEPARATOR = "\0", "\U0001f600", "\u2028"


def encoder(template="none", **options):
    tokenizer = characters(alphabet="abcdefghijklmnopqrstuvwxyz[]:")
    tokenizer.chat_template = TEMPLATE
    return Encoder(tokenizer, template, None, **options)


def test_two_prompts_that_become_equal_are_said_once_with_the_first_row(caplog):
    made = encoder()
    texts = ("a", f"a{NUL}", f"a{EMOJI}")
    rows = PlacedRows((f"f line {number}", {"prompt": text}) for number, text in enumerate(texts, 1))
    one, two, three = made.prompts(rows)
    assert two == three != one
    made.prompts(rows)
    assert [record.message.partition(", so")[0] for record in caplog.records] == [
        "f line 2: the tokenizer has no token for '\\x00' (U+0000), which becomes <unk>"
    ]


@pytest.mark.parametrize("character", [NUL, EMOJI, SEPARATOR])
def test_an_answer_with_such_a_character_is_refused(character):
    shown = f"no token for {character!r} (U+{ord(character):04X}) of an answer, which would train <unk>; remove the row"
    for row in (
        {"prompt": "a", "response": f"b{character}"},
        {"prompt": None, "response": f"b{character}"},
    ):
        with pytest.raises(ValueError, match="of an answer") as found:
            supervised_row(encoder(), 0, row, row["response"])
        assert shown in str(found.value)
    messages = [{"role": "assistant", "content": f"b{character}"}]
    with pytest.raises(ValueError, match="of an answer"):
        supervised_row(encoder("chat"), 0, {"prompt": "a"}, messages)


def test_a_score_of_an_answer_with_such_a_character_trains(caplog):
    supervised_row(encoder(scored=True), 0, {"prompt": "a"}, "b\0")
    assert "has no token for" in caplog.text
    caplog.clear()
    encoder().example({"prompt": "a", "response": "b\0"})  # as models of rewards read it
    assert not caplog.records


def test_such_a_character_in_a_step_is_said(caplog):
    encoder().steps({"prompt": "a"}, ["b", "c\0"], "z")
    assert "has no token for '\\x00' (U+0000)" in caplog.text


def test_such_a_character_that_does_not_train_is_said(caplog):
    made, row = encoder(), {"prompt": f"a{SEPARATOR}", "response": "b"}
    for _ in range(2):
        assert supervised_row(made, 0, row, "b")["response_mask"].tolist() == [False, False, True, True]
    [record] = caplog.records
    assert record.message.startswith(f"the row that begins {row['prompt'] + 'b'!r}: the tokenizer has no token for")


def test_texts_with_a_token_for_each_character_are_silent(caplog):
    made = encoder()
    made.prompts([{"prompt": "a<unk>"}])  # the token itself
    supervised_row(made, 0, {"prompt": "a"}, "b<eos>")
    tokenizer = characters(alphabet="ab")
    tokenizer.unk_token = tokenizer.eos_token  # as of byte-level BPE
    supervised_row(Encoder(tokenizer, "none", None), 0, {"prompt": "a"}, "b<eos>")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
