"""From rows to ids: the prompt that training sees is the prompt that sampling sees."""

import re
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[a:{% endif %}"
)


def tokenizer(template: str | None = None, begin: bool = False) -> PreTrainedTokenizerBase:
    made = characters(alphabet="abcdefghijklmnopqrstuvwxyz^[]:= ")
    made.chat_template = template
    made.bos_token = "^"
    if begin:
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single="^ $A", special_tokens=[("^", made.convert_tokens_to_ids("^"))]
        )
    return made


def text(encoder: Encoder, row: dict[str, Any]) -> str:
    return str(encoder._tokenizer.decode(encoder.prompt(row)))


def test_without_a_template_the_text_stands_as_it_is() -> None:
    encoder = Encoder(tokenizer(), "none", None)
    assert text(encoder, {"prompt": "sort c b a ="}) == "sort c b a ="


def test_the_begin_token_comes_where_the_tokenizer_puts_one() -> None:
    encoder = Encoder(tokenizer(begin=True), "none", None)
    assert text(encoder, {"prompt": "ab"}) == "^ab"
    ids, trains = encoder.example({"prompt": "ab", "response": "c"})
    assert encoder._tokenizer.decode(ids) == "^abc<eos>"  # once, and not in front of the response
    assert trains == [False, False, False, True, True]
    assert text(Encoder(tokenizer(TEMPLATE, begin=True), "chat", None), {"prompt": "ab"}) == "[u:ab][a:"


@pytest.mark.parametrize(
    ("system", "prompt", "expected"),
    [
        (None, "hi", "[u:hi][a:"),
        ("be", "hi", "[s:be][u:hi][a:"),
        (None, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "[u:x][a:y"),
        ("be", [{"role": "user", "content": "x"}], "[s:be][u:x][a:"),
        ("be", [{"role": "system", "content": "own"}, {"role": "user", "content": "x"}], "[s:own][u:x][a:"),
    ],
)
def test_chat(system: str | None, prompt: Any, expected: str) -> None:
    encoder = Encoder(tokenizer(TEMPLATE), "chat", system)
    assert text(encoder, {"prompt": prompt}) == expected


def test_chat_is_what_transformers_makes_of_it() -> None:
    made = tokenizer(TEMPLATE)
    messages = [{"role": "user", "content": "a b"}]
    theirs = made.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Encoder(made, "chat", None).prompt({"prompt": "a b"}) == theirs


@pytest.mark.parametrize("template", ["none", "chat"])
def test_an_example_begins_with_its_prompt(template: str) -> None:
    encoder = Encoder(tokenizer(TEMPLATE), template, None)
    row = {"prompt": "sort b a =", "response": "a b"}
    prompt = encoder.prompt(row)
    ids, trains = encoder.example(row)
    assert ids[: len(prompt)] == prompt
    assert encoder._tokenizer.decode(ids[len(prompt) :]) == "a b<eos>"
    assert trains == [False] * len(prompt) + [True] * 4


@pytest.mark.parametrize(
    ("row", "expected", "trained"),
    [
        ({"prompt": "^ab", "response": "c<eos>"}, "^abc<eos>", 2),  # as a template that is rendered elsewhere
        ({"prompt": "ab", "response": "c<eos>d"}, "^abc<eos>d<eos>", 4),
        ({"prompt": "^", "response": "a"}, "^a<eos>", 2),
        ({"response": "^ab"}, "^ab<eos>", 3),
        ({"response": "ab<eos>"}, "^ab<eos>", 3),
    ],
)
def test_a_mark_that_a_text_has_is_not_written_again(row: dict[str, Any], expected: str, trained: int) -> None:
    encoder = Encoder(tokenizer(begin=True), "none", None)
    ids, trains = encoder.example(row)
    assert encoder.decode(ids) == expected and sum(trains) == trained
    if "prompt" in row:
        assert ids[: len(ids) - trained] == encoder.prompt(row) == encoder.prompts([row])[0]


def test_an_empty_response_trains_the_end_alone() -> None:
    ids, trains = Encoder(tokenizer(), "none", None).example({"prompt": "a", "response": ""})
    assert len(ids) == 2 and trains == [False, True]


def test_many_prompts_are_each_prompt() -> None:
    encoder = Encoder(tokenizer(begin=True), "none", None)
    rows = [{"prompt": "a"}, {"prompt": "b c"}, {"prompt": "a" * 50}]
    assert encoder.prompts(rows) == [encoder.prompt(row) for row in rows]
    assert encoder.prompts([]) == []


def test_bad_settings_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"data\.template=chat: the tokenizer has no chat template"):
        Encoder(tokenizer(), "chat", None)
    with pytest.raises(ValueError, match=r"data\.system has no effect with data\.template=none"):
        Encoder(tokenizer(TEMPLATE), "none", "be")
    endless = tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="no end token"):
        Encoder(endless, "none", None)


def test_bad_rows() -> None:
    encoder = Encoder(tokenizer(), "none", None)
    with pytest.raises(ValueError, match=r"^row 2: the prompt is empty"):
        encoder.prompts([{"prompt": "a"}, {"prompt": ""}])
    with pytest.raises(ValueError, match=r"^the prompt is int.*columns\.prompt"):
        encoder.prompt({"prompt": 3})
    with pytest.raises(ValueError, match=r"the prompt is a list of chat messages; set data\.template=chat"):
        encoder.prompt({"prompt": [{"role": "user", "content": "x"}]})
    with pytest.raises(ValueError, match=r"a response is int.*columns\.response"):
        encoder.example({"prompt": "a", "response": 3})


def test_a_text_without_a_prompt_trains_whole_from_its_second_token_on() -> None:
    ids, trains = Encoder(tokenizer(), "none", None).example({"response": "abc"})
    assert (len(ids), trains) == (4, [False, True, True, True])
    made = tokenizer(begin=True)
    ids, trains = Encoder(made, "none", None).example({"prompt": None, "response": "abc"})
    assert made.decode(ids) == "^abc<eos>" and trains == [False, True, True, True, True]
    with pytest.raises(ValueError, match="a text is empty"):
        Encoder(tokenizer(), "none", None).example({"response": ""})


def test_bad_conversations() -> None:
    encoder = Encoder(tokenizer(TEMPLATE), "chat", None)
    with pytest.raises(ValueError, match=r"a response is a list of chat messages, which needs a chat template"):
        Encoder(tokenizer(), "none", None).example({"response": [{"role": "user", "content": "x"}]})
    for response, message in (
        ([], "a response is empty, not a list"),
        (
            [{"from": "human", "value": "x"}],
            "message 0 of a response is {'from': 'human', 'value': 'x'}; expected {role",
        ),
        ([{"role": "user", "content": "x"}, "y"], "message 1 of a response is 'y'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            encoder.example({"response": response})
    with pytest.raises(ValueError, match="the prompt is empty, not a list of chat messages"):
        encoder.prompt({"prompt": []})
