"""The tokens between two answers are those that the template writes there, or there are none."""

import json
from collections import Counter

import pytest
from tokenizers import AddedToken

from rft.data.encode.encoder import Encoder
from rft.rollout.environment.turn_template import NoSuffix, TurnTemplate
from tests.data import chat_texts as chats
from tests.data.encode.test_encoder import TEMPLATE
from tests.data.encode.test_encoder import tokenizer as plain
from tests.data.encode.test_masks import SCHEMA, TOOL, TWO, tokenizer, user
from tests.rollout.environment import trl_templates as trl

RESULT = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "call00000"}
KINDS = {"user": [user("And 3+3?")], "tool": [RESULT], "tools": [RESULT, RESULT | {"tool_call_id": "call00001"}]}


def made(template, **options):
    """A tokenizer and its `TurnTemplate`."""
    own = tokenizer(template, **options)
    return own, TurnTemplate(Encoder(own, "chat", None))


def between(template, messages, end=None, tools=None, **options):
    """The text of a suffix behind an end token."""
    own, turns = made(template, **options)
    return own.decode(turns.suffix(messages, None if end is None else own.convert_tokens_to_ids(end), tools))


def test_an_opening_is_the_prompt_of_the_encoder():
    own = tokenizer(chats.QWEN25)
    encode = Encoder(own, "chat", "Add.")
    opening = TurnTemplate(encode).opening(TWO[:1], [SCHEMA])
    assert [opening] == encode.prompts([{"prompt": TWO[:1], "tools": [SCHEMA]}]) and "Adds." in own.decode(opening)
    encode = Encoder(plain(begin=True), "none", None)
    assert TurnTemplate(encode).opening([user("a b")]) == encode.prompt({"prompt": "a b"})
    for messages, tools in ((TWO, None), (TWO[:1], [SCHEMA])):
        with pytest.raises(ValueError, match=r"set data\.template=chat"):
            TurnTemplate(encode).opening(messages, tools)


def test_without_a_template_a_suffix_is_the_contents():
    own = plain(begin=True)
    suffix = TurnTemplate(Encoder(own, "none", None)).suffix([user("a b"), TOOL | {"content": "c"}], own.eos_token_id)
    assert own.decode(suffix) == "a bc"


def test_the_end_token_is_written_only_where_it_was_not_sampled():
    behind = "\n<|im_start|>user\nAnd 3+3?<|im_end|>\n<|im_start|>assistant\n"
    assert between(chats.CHATML, [TWO[2]], "<|im_end|>") == behind
    assert between(chats.CHATML, [TWO[2]]) == f"<|im_end|>{behind}"
    assert between(chats.PHI3, [user("a")], "<|endoftext|>") == "<|end|>\n<|user|>\na<|end|>\n<|assistant|>\n"


def test_another_end_token_of_the_last_answer_ends_it_too():
    behind = "<|start|>user<|message|>And 3+3?<|end|><|start|>assistant"
    assert between(chats.HARMONY, [TWO[2]], "<|return|>") == between(chats.HARMONY, [TWO[2]], "<|end|>") == behind
    assert between(chats.HARMONY, [TWO[2]]) == f"<|end|>{behind}"
    headed = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% else %}{{ eos_token }}{% endif %}"  # noqa: E501
    own = tokenizer(chats.PHI3)
    own.chat_template = headed  # the end of the whole, and then the next header
    assert own.decode(TurnTemplate(Encoder(own, "chat", None)).suffix([user("a")], own.eos_token_id)) == (
        "<|user|>a<|assistant|>"
    )


def test_results_follow_the_calls_of_an_answer():
    called = "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant"
    assert between(chats.HARMONY, [RESULT], "<|call|>") == called  # it takes arguments as JSON
    with pytest.raises(NoSuffix, match="the answer has no end token"):
        between(chats.HARMONY, [RESULT])
    behind = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert between(chats.QWEN25, [RESULT], "<|im_end|>") == behind
    assert between(chats.QWEN25, [RESULT]) == f"<|im_end|>{behind}"
    assert between(chats.LLAMA3, [RESULT], "<|eot_id|>").startswith("<|start_header_id|>tool")  # it renders no calls


@pytest.mark.parametrize(
    "condition",
    [
        "messages | length > 3",
        "messages[0].role == 'system'",
        "messages | selectattr('reasoning_content', 'defined') | list",
        "messages | selectattr('tool_calls', 'defined') | list",
        "messages | selectattr('role', 'equalto', 'tool') | list",
        "tools",
    ],
)
def test_a_suffix_that_depends_on_more_than_its_messages_is_none(condition):
    own = tokenizer(chats.CHATML)
    own.chat_template = f"{chats.CHATML}{{% if {condition} %}}more{{% endif %}}"
    turns = TurnTemplate(Encoder(own, "chat", None))
    for _ in range(2):  # the second time from memory
        with pytest.raises(NoSuffix, match="user: the template writes something else behind other conversations"):
            turns.suffix([TWO[2]], None, [SCHEMA])


def test_tools_count_only_where_there_are_tools(tmp_path):
    own = tokenizer(chats.CHATML)
    own.chat_template = f"{chats.CHATML}{{% if tools %}}more{{% endif %}}"
    TurnTemplate(Encoder(own, "chat", None)).suffix([TWO[2]], None)
    (tmp_path / "tools.json").write_text(json.dumps([SCHEMA]))
    always = TurnTemplate(Encoder(own, "chat", None, str(tmp_path / "tools.json")))
    for turns, tools in ((TurnTemplate(Encoder(own, "chat", None)), [SCHEMA]), (always, None)):
        with pytest.raises(NoSuffix, match="user: the template writes something else behind other conversations"):
            turns.suffix([TWO[2]], own.eos_token_id, tools)


def test_tools_alone_do_not_hinder():
    qwen = [between(chats.QWEN25, [TWO[2]], "<|im_end|>", tools) for tools in (None, [SCHEMA])]
    assert qwen[0] == qwen[1]


def test_a_template_that_ignores_messages_is_refused():
    own = tokenizer(chats.LLAMA2)
    with pytest.raises(ValueError, match=r"data\.template=chat does not write the text of messages of role tool"):
        TurnTemplate(Encoder(own, "chat", None)).suffix([RESULT], None)
    own.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match=r"data\.template=chat does not write the text of messages of role assistant"):
        TurnTemplate(Encoder(own, "chat", None)).suffix([TWO[2]], None)


def test_no_token_crosses_the_end_of_an_answer():
    assert between(chats.LLAMA2, [user("hi")], "</s>") == "<s>[INST] hi [/INST]"
    with pytest.raises(NoSuffix, match="ends answers without a special token"):
        between(chats.LLAMA2, [user("hi")])  # " </s>" begins with a space, which may join the token before it
    own = plain(TEMPLATE)
    turns = TurnTemplate(Encoder(own, "chat", None))
    assert own.decode(turns.suffix([user("x")], own.eos_token_id)) == "][u:x][a:"
    with pytest.raises(NoSuffix, match="ends answers without a special token"):
        turns.suffix([user("x")], None)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("strips", [False, True])
def test_the_tokens_are_those_in_their_context(pieces, strips):
    """Also where a token takes the white space around it, or words begin with a space."""
    own = tokenizer(chats.CHATML, pieces)
    if strips:
        own.add_tokens([AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True, lstrip=True)])
    encode = Encoder(own, "chat", None)
    whole, end = encode.prompt({"prompt": TWO[:3]}), own.convert_tokens_to_ids("<|im_end|>")
    for cut, suffix in (
        (0, TurnTemplate(encode).suffix([TWO[2]], None)),
        (1, TurnTemplate(encode).suffix([TWO[2]], end)),
    ):
        start = len(whole) - len(suffix)
        assert whole[start:] == suffix and whole[start - cut] == end


def outcome(name, kind):
    """What becomes of the messages of a kind: the ends of answers behind which they have a suffix, or the reason why
    there are none."""
    turns, added = TurnTemplate(trl.encoder(name)), trl.encoder(name).chat.added
    try:
        for end in (None, *added):
            try:
                turns.suffix(KINDS[kind], end)
            except NoSuffix as reason:
                if "no end token" not in str(reason):
                    return "forks"
    except ValueError:
        return "refused"
    return "bridged"


@trl.needs_trl
def test_the_templates_of_trl():
    """Of 72 templates; the six without texts take a content as parts alone."""
    assert len(trl.NAMES) == 72 and set(trl.NAMES) > trl.NO_TEXT
    names = [name for name in trl.NAMES if name not in trl.NO_TEXT]
    found = {kind: {name: outcome(name, kind) for name in names} for kind in KINDS}
    assert Counter(found["user"].values()) == {"bridged": 66}
    assert Counter(found["tool"].values()) == {"bridged": 50, "forks": 10, "refused": 6}
    assert Counter(found["tools"].values()) == {"bridged": 48, "forks": 12, "refused": 6}
