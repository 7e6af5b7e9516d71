# ruff: noqa: RUF001  (bars of DeepSeek)
"""What trains in a conversation, for the templates of well-known models: the trained tokens, decoded."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rft.actor.model import with_end_token
from rft.data.encode.encoder import Encoder
from rft.data.encode.fates import MARKS
from rft.data.encode.parts import conversation
from tests.data import chat_texts as chats
from tests.data.chat_texts import SPECIAL

CORPUS = [
    "What is 2+2?\n\nIt is 4. [INST] hi [/INST]",
    "<think>\nthree and three\n</think>\n\nIt is 6.</tool_call>\n",
] * 9


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Add."}
TWO = [user("What is 2+2?"), said("It is 4."), user("And 3+3?"), said("It is 6.")]
LED = [SYSTEM, *TWO]
THOUGHT = [said("<think>\ntwo and two\n</think>\n\nIt is 4."), said("<think>\nthree and three\n</think>\n\nIt is 6.")]
THINKING = [TWO[0], THOUGHT[0], TWO[2], THOUGHT[1]]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"role": "tool", "content": "4"}
CALLING = [TWO[0], said("", tool_calls=[CALL]), TOOL, TWO[1]]
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
TEXT_CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
PLANNED = [TWO[0], said("<think>\nI add\n</think>\n\n", tool_calls=[CALL]), TOOL, THOUGHT[0]]
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}

CASES = {
    "chatml": (chats.CHATML, LED, ["It is 4.<|im_end|>", "It is 6.<|im_end|>"]),
    "llama3": (chats.LLAMA3, LED, ["It is 4.<|eot_id|>", "It is 6.<|eot_id|>"]),
    "mistral": (chats.MISTRAL, TWO, [" It is 4.</s>", " It is 6.</s>"]),
    "gemma": (chats.GEMMA, TWO, ["It is 4.<end_of_turn>", "It is 6.<end_of_turn>"]),
    "deepseek": (chats.DEEPSEEK, LED, ["It is 4.<｜end▁of▁sentence｜>", "It is 6.<｜end▁of▁sentence｜>"]),
    "deepseek with a call": (
        chats.DEEPSEEK,
        [TWO[0], said("", tool_calls=[TEXT_CALL]), TOOL, TWO[1]],
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
            "It is 4.<｜end▁of▁sentence｜>",
        ],
    ),
    "qwen2.5": (chats.QWEN25, TWO, ["It is 4.<|im_end|>", "It is 6.<|im_end|>"]),
    # a line break stands behind the prompt, before the call
    "qwen2.5 with a call": (chats.QWEN25, CALLING, [CALLED, "It is 4.<|im_end|>"]),
    # the first thought is gone, so the first answer would be one without a thought
    "qwen3": (chats.QWEN3, THINKING, ["<think>\nthree and three\n</think>\n\nIt is 6.<|im_end|>"]),
    "qwen3 without thoughts": (chats.QWEN3, TWO, ["<think>\n\n</think>\n\nIt is 6.<|im_end|>"]),
    # the template writes an empty thought before the last answer alone
    "qwen3 with a call": (chats.QWEN3, CALLING, [CALLED, "<think>\n\n</think>\n\nIt is 4.<|im_end|>"]),
    "qwen3 that thinks between calls": (
        chats.QWEN3,
        PLANNED,
        [f"<think>\nI add\n</think>\n\n{CALLED}", "<think>\ntwo and two\n</think>\n\nIt is 4.<|im_end|>"],
    ),
    "zephyr": (chats.ZEPHYR, LED, ["It is 4.</s>", "It is 6.</s>"]),
    "llama2": (chats.LLAMA2, TWO, [" It is 4. </s>", " It is 6. </s>"]),
    "gpt-oss with a call": (
        chats.HARMONY,
        [TWO[0], said("", tool_calls=[TEXT_CALL]), TOOL, TWO[1]],
        [
            '<|channel|>commentary to=functions.add<|message|>{"a": 2}<|call|>',
            "<|channel|>final<|message|>It is 4.<|return|>",
        ],
    ),
    # a first answer that ends as if more came from the assistant is none that sampling would end with
    "gpt-oss": (chats.HARMONY, TWO, ["<|channel|>final<|message|>It is 6.<|return|>"]),
    "phi3": (chats.PHI3, TWO, ["It is 4.<|end|>", "It is 6.<|end|>"]),
}


def tokenizer(template: str, pieces: bool = False, more: tuple[str, ...] = ()) -> PreTrainedTokenizerBase:
    """A small byte-level BPE, or one with pieces of words that begin with a space, and a template's special tokens."""
    begin, end, *others = SPECIAL[template]
    made = Tokenizer(models.BPE(unk_token="<unk>") if pieces else models.BPE())
    made.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="first") if pieces else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    made.decoder = decoders.Metaspace(prepend_scheme="first") if pieces else decoders.ByteLevel()
    alphabet = [] if pieces else sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False
    )
    made.train_from_iterator([*CORPUS, *more], trainer)
    special = [token for token in (begin, end, *others) if token is not None]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=begin, eos_token=end)
    wrapped.chat_template = template
    return wrapped


def trained(encoder: Encoder, row: dict[str, Any]) -> list[str]:
    """The texts of the runs of trained tokens."""
    ids, trains = encoder.example(row)
    runs: list[list[int]] = []
    for place, (token, flag) in enumerate(zip(ids, trains, strict=True)):
        if flag:
            runs += [] if place and trains[place - 1] else [[]]
            runs[-1].append(token)
    return [encoder._tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(("template", "messages", "expected"), CASES.values(), ids=CASES)
def test_what_trains_and_what_stands_before_it(template, messages, expected):
    made = tokenizer(template)
    encoder = Encoder(made, "chat", None)
    row = {"response": messages}
    ids, trains = encoder.example(row)
    assert trained(encoder, row) == expected
    assert made.decode(ids) == made.apply_chat_template(messages, tokenize=False)
    starts = [place for place, flag in enumerate(trains) if flag and not trains[place - 1]]
    asked = [place for place, message in enumerate(messages) if message["role"] == "assistant"][-len(starts) :]
    for start, place in zip(starts, asked, strict=True):
        assert ids[:start] == encoder.prompt({"prompt": messages[:place]})


@pytest.mark.parametrize(("template", "messages", "expected"), CASES.values(), ids=CASES)
def test_an_answer_ends_with_the_token_of_the_template_as_a_text_and_as_a_message(template, messages, expected):
    """Whatever end token the tokenizer has, such as that of a base model."""
    made = tokenizer(template)
    end = Encoder(made, "chat", None).end
    assert expected[-1].endswith(made.convert_ids_to_tokens(end))
    if "eos_token" not in template:
        made.eos_token = next(
            token for token in SPECIAL[template] if token and token != made.convert_ids_to_tokens(end)
        )
    encoder = Encoder(made, "chat", None)
    assert encoder.end == end
    text = made.convert_ids_to_tokens(end)
    for response in ("It is 4.", [said("It is 4.")], f"It is 4.{text}", [said(f"It is 4.{text}")]):
        ids, trains = encoder.example({"prompt": "What is 2+2?", "response": response})
        ended = [token for token, flag in zip(ids, trains, strict=True) if flag]
        assert ended[-1] == end and ended.count(end) == 1


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("out", [0, False, 0.0])
def test_a_turn_that_is_marked_does_not_train(name, out):
    encoder = Encoder(tokenizer(chats.CHATML), "chat", None)
    last = Encoder(tokenizer(chats.CHATML), "chat", None, train_on="last")
    first, second = ("It is 4.<|im_end|>", "It is 6.<|im_end|>")
    for marks, expected in (((out, 1), [second]), ((True, out), [first]), ((1, 1.0), [first, second])):
        marked = iter(marks)
        messages = [m | {name: next(marked)} if m["role"] == "assistant" else m for m in TWO]
        assert trained(encoder, {"response": messages}) == expected
        assert trained(last, {"response": messages}) == expected[-1:]
        assert encoder.example({"response": messages})[0] == encoder.example({"response": TWO})[0], (
            "the tokens are the same"
        )
    with pytest.raises(
        ValueError, match=r"begins 'What is 2\+2\?' no message is an answer of the assistant that trains"
    ):
        encoder.example({"response": [TWO[0], TWO[1] | {name: out}]})
    with pytest.raises(
        ValueError, match=r"^data\.train_on=all trains every token alike, and an answer of this row is marked"
    ):
        Encoder(tokenizer(chats.CHATML), "chat", None, train_on="all").example(
            {"response": [TWO[0], TWO[1] | {name: out}]}
        )


@pytest.mark.parametrize("template", [chats.CHATML, chats.GEMMA, chats.ZEPHYR, chats.LLAMA3])
def test_a_row_that_is_scored_ends_with_its_answer(template):
    """Some templates write a line break behind it."""
    made = tokenizer(template)
    plain, scored = Encoder(made, "chat", None), Encoder(made, "chat", None, scored=True)
    row = {"prompt": [user("What is 2+2?")], "response": [said("It is 4.")]}
    ids, trains = scored.example(row)
    assert ids[-1] == scored.end and trains[-1]
    assert trained(scored, row) == trained(plain, row) == trained(scored, row | {"response": "It is 4."})
    assert plain.example(row)[0][: len(ids)] == ids
    assert ids == scored.example(row | {"response": "It is 4."})[0]
    text = made.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) + "It is 4."
    assert with_end_token(made, scored.end)(text).input_ids == ids, "as transformers reads it from the export"


@pytest.mark.parametrize(("template", "messages", "expected"), CASES.values(), ids=CASES)
def test_the_last_turn_alone_is_the_response_behind_a_prompt(template, messages, expected):
    last = Encoder(tokenizer(template), "chat", None, train_on="last")
    response = Encoder(tokenizer(template), "chat", None)
    given = {"prompt": messages[:-1], "response": messages[-1:]}
    assert trained(last, {"response": messages}) == trained(response, given) == trained(last, given) == expected[-1:]
    assert last.example({"response": messages}) == response.example(given)


@pytest.mark.parametrize("template", [chats.CHATML, chats.LLAMA3, chats.GEMMA, chats.ZEPHYR, chats.MISTRAL])
def test_turns_of_a_prompt_train_where_every_turn_of_the_assistants_does(template):
    encoder = Encoder(tokenizer(template), "chat", None, train_on="assistant")
    whole = encoder.example({"response": TWO})
    assert encoder.example({"prompt": TWO[:-1], "response": TWO[-1:]}) == whole
    assert encoder.example({"prompt": TWO[:-1], "response": "It is 6."}) == whole
    assert len(trained(encoder, {"response": TWO})) == 2


@pytest.mark.parametrize("template", [chats.CHATML, chats.LLAMA3, chats.DEEPSEEK, chats.ZEPHYR])
def test_a_text_is_what_the_template_makes_of_an_answer_that_it_does_not_touch(template):
    made = tokenizer(template)
    encoder = Encoder(made, "chat", "Add.")
    text = encoder.example({"prompt": "What is 2+2?", "response": "It is 4."})
    ids, trains = encoder.example({"prompt": "What is 2+2?", "response": [said("It is 4.")]})
    kept = max(place for place, flag in enumerate(trains, 1) if flag)
    assert text == (ids[:kept], trains[:kept])


def test_everything_trains_but_the_first_token():
    encoder = Encoder(tokenizer(chats.LLAMA3), "chat", None, train_on="all")
    ids, trains = encoder.example({"response": TWO})
    assert ids == encoder.encode([encoder._tokenizer.apply_chat_template(TWO, tokenize=False)])[0]
    assert trains == [False] + [True] * (len(ids) - 1)
    text, flags = encoder.example({"prompt": "hi", "response": "ho"})
    assert flags == [False] + [True] * (len(text) - 1)


def test_a_thought_that_the_prompt_begins_and_the_template_drops_is_refused():
    """DeepSeek R1; as a text, the thought trains as it stands."""
    encoder = Encoder(tokenizer(chats.DEEPSEEK_R1), "chat", None)
    with pytest.raises(ValueError, match=r"data\.template=chat: in the conversation that begins 'What is 2\+2\?' the"):
        encoder.example({"response": TWO})
    called = [TWO[0], said("", tool_calls=[TEXT_CALL]), TOOL, TWO[1]]  # behind results the prompt begins no thought
    assert trained(encoder, {"response": called}) == ["It is 4.<｜end▁of▁sentence｜>"]
    with pytest.raises(ValueError, match="rewrites its last answer"):
        encoder.example({"response": [*called, *TWO[2:]]})
    row = {"prompt": "What is 2+2?", "response": "two and two\n</think>\n\nIt is 4."}
    assert trained(encoder, row) == ["two and two\n</think>\n\nIt is 4.<｜end▁of▁sentence｜>"]
    assert encoder._tokenizer.decode(encoder.prompt(row)).endswith("<｜Assistant｜><think>\n")


def test_a_prompt_that_the_whole_does_not_begin_with_is_refused():
    """Mistral's puts the system message before a question that is the last message, and nowhere else."""
    for trains in ("response", "last"):
        encoder = Encoder(tokenizer(chats.MISTRAL), "chat", None, train_on=trains)
        assert "Add." in encoder._tokenizer.decode(encoder.prompt({"prompt": LED[:2]}))
        with pytest.raises(ValueError, match="rewrites its last answer or the text before it"):
            encoder.example({"response": LED})


def test_a_conversation_without_an_answer_is_refused():
    encoder = Encoder(tokenizer(chats.CHATML), "chat", None)
    for messages in ([user("hi")], [SYSTEM, said("ho")], [said("ho"), user("hi")]):
        with pytest.raises(ValueError, match="no message is an answer of the assistant"):
            encoder.example({"response": messages})


def test_a_question_behind_the_last_answer_does_not_train():
    encoder = Encoder(tokenizer(chats.CHATML), "chat", None)
    assert trained(encoder, {"response": TWO[:3]}) == ["It is 4.<|im_end|>"]
    with pytest.raises(ValueError, match="the template rewrites"):
        Encoder(tokenizer(chats.QWEN3), "chat", None).example({"response": THINKING[:3]})


def test_a_template_that_ends_no_answer_is_refused():
    endless = chats.CHATML.replace("<|im_end|>", "")
    SPECIAL[endless] = SPECIAL[chats.CHATML]
    encoder = Encoder(tokenizer(endless), "chat", None)
    with pytest.raises(ValueError, match=r"data\.template=chat does not end answers with a special token"):
        encoder.example({"response": TWO})
    assert trained(encoder, {"prompt": "a", "response": "b"}) == ["b<|im_end|>"]


def test_tokens_over_the_border_are_cut_where_sampling_would_begin():
    """The prompt ends in a line break, which the tokenizer joins with those that the answer begins with."""
    made = tokenizer(chats.CHATML, more=("\n\n",) * 9)
    row = {"prompt": "a", "response": "\n\nIt is 4."}
    assert made.tokenize("\n\n\nIt")[0] == made.tokenize("\n\n")[0] != made.tokenize("\n")[0]
    for response in (row["response"], [said(row["response"])]):
        encoder = Encoder(made, "chat", None)
        ids, trains = encoder.example({**row, "response": response})
        assert ids[: trains.index(True)] == encoder.prompt(row)
        assert trained(encoder, {**row, "response": response}) == ["\n\nIt is 4.<|im_end|>"]


def test_pieces_of_words_begin_no_answer_with_a_space_that_is_not_there():
    made = tokenizer(chats.ZEPHYR, pieces=True)
    encoder = Encoder(made, "chat", None)
    whole = made.tokenize(made.apply_chat_template(TWO[:2], tokenize=False))
    ids, _ = encoder.example({"response": TWO[:2]})
    assert made.convert_ids_to_tokens(ids) == whole
    ids, trains = encoder.example({"prompt": "What is 2+2?", "response": "It is 4."})
    assert made.convert_ids_to_tokens(ids)[trains.index(True)] in ("I", "It")


def test_nulls_of_tables_are_no_keys_of_a_message():
    """A table has every key in every row; DeepSeek's template looks whether there is a call."""
    encoder = Encoder(tokenizer(chats.DEEPSEEK), "chat", None)
    filled = [{**message, "tool_calls": None, "name": None} for message in TWO]
    assert encoder.example({"response": filled}) == encoder.example({"response": TWO})


def test_tools_stand_in_the_prompt(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([SCHEMA]))
    made = tokenizer(chats.QWEN25)
    for_all = Encoder(made, "chat", None, tools=str(tmp_path / "tools.json"))
    own = Encoder(made, "chat", None)
    assert for_all.prompt({"prompt": "a"}) == own.prompt({"prompt": "a", "tools": [SCHEMA]})
    assert for_all.prompt({"prompt": "a"}) == own.prompt({"prompt": "a", "tools": json.dumps([SCHEMA])})
    assert for_all.prompt({"prompt": "a"}) != own.prompt({"prompt": "a", "tools": None})
    ids, trains = for_all.example({"response": CALLING})
    assert ids[: trains.index(True)] == for_all.prompt({"prompt": CALLING[:1]})
    assert '"name": "add", "description": "Adds."' in made.decode(ids)


def test_tools_that_nobody_would_hear_of_are_refused(tmp_path):
    (tmp_path / "tools.json").write_text(json.dumps([SCHEMA]))
    made = tokenizer(chats.CHATML)
    with pytest.raises(ValueError, match=r"data\.tools=.*: data\.template=chat ignores tools"):
        Encoder(made, "chat", None, tools=str(tmp_path / "tools.json"))
    with pytest.raises(ValueError, match=r"the field tools of a row: data\.template=chat ignores tools"):
        Encoder(made, "chat", None).prompt({"prompt": "a", "tools": [SCHEMA]})
    with pytest.raises(ValueError, match=r"data\.tools has no effect with data\.template=none"):
        Encoder(made, "none", None, tools="tools.json")
    knows = tokenizer(chats.QWEN25)
    with pytest.raises(ValueError, match=r"data\.tools=no\.json: there is no such file"):
        Encoder(knows, "chat", None, tools="no.json")
    for wrong, message in ((["add"], "expected a list of tool schemas"), (r'["\ud83d"]', "is not JSON: half of a")):
        with pytest.raises(ValueError, match=f"the field tools of a row:? {message}"):
            Encoder(knows, "chat", None).prompt({"prompt": "a", "tools": wrong})


def test_text_parts_are_joined_and_media_stay_parts():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "image": None}]
    picture = {"type": "image", "image": b"x"}
    assert conversation([{"role": "user", "content": parts}], "the prompt") == [user("a b")]
    [message] = conversation([{"role": "user", "content": [*parts, picture | {"text": None}]}], "the prompt")
    assert message["content"] == [parts[0], {"type": "text", "text": "b"}, picture]
    for part, kind in (
        ({"type": "image_url", "image_url": "x"}, "image_url"),
        ({"type": "image"}, "image"),
        (3, "int"),
    ):
        with pytest.raises(ValueError, match=rf"message 0 of the prompt has a content part of type '{kind}'"):
            conversation([{"role": "user", "content": [parts[0], part]}], "the prompt")
    with pytest.raises(ValueError, match="the content of message 0 of the prompt is int; write it as a text"):
        conversation([{"role": "user", "content": 5}], "the prompt")
    assert conversation([{"role": "tool", "content": {"sum": 5}}], "the prompt")[0]["content"] == {"sum": 5}


@pytest.mark.parametrize(
    "template", [chats.CHATML, chats.LLAMA3, chats.GEMMA, chats.ZEPHYR, chats.MISTRAL, chats.QWEN3]
)
def test_an_answer_that_its_prompt_begins_is_continued(template):
    """The prompt is the text up to there, and the beginning does not train."""
    made = tokenizer(template)
    encoder = Encoder(made, "chat", None)
    begun = [user("What is 2+2?"), said("It")]
    row = {"prompt": begun, "response": " is 4."}
    prompt, end = encoder.prompt(row), made.convert_ids_to_tokens(encoder.end)
    assert made.decode(prompt) == made.apply_chat_template(begun, continue_final_message=True, tokenize=False)
    for response in (row["response"], [said(" is 4.")]):
        ids, trains = encoder.example(row | {"response": response})
        assert ids[: len(prompt)] == prompt and trains[: len(prompt)] == [False] * len(prompt)
        assert trained(encoder, row | {"response": response}) == [f" is 4.{end}"]
    every = Encoder(made, "chat", None, train_on="assistant")
    if template != chats.QWEN3:  # whose first answer stands without the thought that it had
        assert trained(every, row | {"prompt": [*TWO[:2], *begun]})[-1] == f" is 4.{end}"
        assert len(trained(every, row | {"prompt": [*TWO[:2], *begun]})) == 2
    whole = made.decode(encoder.example({"prompt": begun[:1], "response": [said("It is 4.")]})[0])
    assert template == chats.QWEN3 or whole == made.decode(encoder.example(row | {"response": [said(" is 4.")]})[0])


def test_an_answer_that_cannot_be_continued_is_refused():
    encoder = Encoder(tokenizer(chats.QWEN25), "chat", None)
    with pytest.raises(
        ValueError, match="the prompt ends with a message of the assistant, which the response continues"
    ):
        encoder.example({"prompt": [TWO[0], {"role": "assistant", "tool_calls": [CALL]}], "response": [TWO[1]]})
    with pytest.raises(ValueError, match="ends with tool calls of the assistant; add their results"):
        encoder.prompt({"prompt": [TWO[0], said("", tool_calls=[CALL])]})


@pytest.mark.parametrize(
    "empty", [{"content": None}, {}, {"content": None, "tool_calls": [], "name": "a", "weight": 1}]
)
def test_an_answer_that_says_nothing_is_refused_where_it_would_train(empty: dict[str, Any]) -> None:
    encoder = Encoder(tokenizer(chats.CHATML), "chat", None, train_on="assistant")
    for messages in ([*TWO[:3], {"role": "assistant", **empty}], [TWO[0], {"role": "assistant", **empty}, *TWO[2:]]):
        with pytest.raises(
            ValueError, match=r"^message [13], an answer of the assistant, has neither content nor tool_cal"
        ):
            encoder.example({"prompt": None, "response": messages})
    ids, _ = encoder.example({"prompt": None, "response": [*TWO[:3], said("")]})
    assert ids, "an empty text trains the end token"
