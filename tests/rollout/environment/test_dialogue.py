"""A dialogue holds what the engine sampled, token by token, whatever the chat template does to it."""

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rft.batch.trajectory import Finish, Segment, Trajectory, to_row
from rft.data.encode.encoder import Encoder
from rft.rollout.answers import Answer, sampled_segment, uncut
from rft.rollout.engine.base import Completion, Request
from rft.rollout.environment.dialogue import Dialogue
from rft.rollout.environment.turn_template import NoSuffix, Renderer, TurnTemplate
from tests.data import chat_texts as chats
from tests.data.encode.test_masks import SCHEMA, TOOL, TWO, said, tokenizer, user
from tests.families import family
from tests.families.rows import encoder as media_encoder
from tests.families.rows import medium
from tests.helpers import hf_engine
from tests.rollout.environment import trl_templates as trl
from tests.rollout.environment.test_turn_template import outcome
from tests.rollout.word_models import build, sampling, word_tokenizer

TURNS = 10


def completion(tokens, ended=True):
    numbers = [-0.5 - place for place in range(len(tokens))]
    return Completion(list(tokens), numbers, "stop" if ended else "length", "", [3] * len(tokens))


def calling(*values, text=False):
    """An answer with calls."""
    calls = []
    for number, value in enumerate(values):
        arguments = {"a": value}
        function = {"name": "add", "arguments": json.dumps(arguments) if text else arguments}
        calls.append({"id": f"call{number:05}", "type": "function", "function": function})
    return said("", tool_calls=calls)


def run(dialogue, turns):
    """Answers and messages in turn. The prompts begin with all before them unless the dialogue forks, and the rows have
    every answer once, unchanged, behind the tokens of its request."""
    requests, answers = [], []
    for answer, message, messages in turns:
        requests.append(list(dialogue.prompt))
        answers.append(answer)
        dialogue.answer(uncut(answer), message)
        forks = len(dialogue.forks)
        dialogue.extend(messages)
        before = requests[-1] + answer.tokens
        assert (dialogue.prompt[: len(before)] == before) or len(dialogue.forks) == forks + 1
    found = []
    for row in dialogue.rows:
        assert row[-1].sampled and all(segment.trains == segment.sampled for segment in row)
        for number, segment in enumerate(row):
            if segment.sampled:
                request = [token for earlier in row[:number] for token in earlier.tokens]
                found.append((request, segment.tokens, segment.logprobs, segment.versions))
    expected = [
        (one, answer.tokens, answer.logprobs, answer.versions) for one, answer in zip(requests, answers, strict=True)
    ]
    assert found == expected
    assert len(dialogue.rows) in (len(dialogue.forks), len(dialogue.forks) + 1)
    return answers


TEMPLATES = {
    "none": None, "chatml": chats.CHATML, "llama3": chats.LLAMA3, "gemma": chats.GEMMA, "llama2": chats.LLAMA2,
    "mistral": chats.MISTRAL, "qwen3": chats.QWEN3, "harmony": chats.HARMONY, "phi3": chats.PHI3,
}  # fmt: skip


PLACE = st.floats(0, 1, exclude_max=True)  # of a token in a vocabulary


@pytest.fixture(scope="module")
def turn_templates():
    made = {}
    for name, template in TEMPLATES.items():
        own = tokenizer(template or chats.CHATML)
        made[name] = len(own), TurnTemplate(Encoder(own, "none" if template is None else "chat", None))
    return made


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(sorted(TEMPLATES)),
    turns=st.lists(
        st.tuples(st.lists(PLACE, min_size=1, max_size=9), st.booleans(), st.text(max_size=9)), min_size=1, max_size=5
    ),
)
def test_any_sampled_tokens_stay(turn_templates, name, turns):
    size, template = turn_templates[name]
    dialogue = Dialogue(template, [user("What is 2+2?")])
    run(dialogue, [
        (completion([int(place * size) for place in places], ended), said("It is 4."), [user(f"a{text}")])
        for places, ended, text in turns
    ])  # fmt: skip
    if name in ("none", "chatml", "llama3", "gemma", "qwen3", "harmony", "phi3"):
        assert dialogue.forks == []


def test_an_answer_that_the_prompt_begins_is_one_message_with_it():
    own = tokenizer(chats.MISTRAL)
    template = TurnTemplate(Encoder(own, "chat", None))
    dialogue = Dialogue(template, [TWO[0], said("It")], [SCHEMA])
    assert own.decode(dialogue.prompt).endswith("[/INST] It")
    run(dialogue, [(completion([65, 66, own.eos_token_id]), {"content": " is 4."}, [TWO[2]])])
    assert dialogue.forks and dialogue.prompt == template.rendered(TWO[:3], [SCHEMA])


def test_a_fork_renders_all_messages_again():
    own = tokenizer(chats.MISTRAL)
    template = TurnTemplate(Encoder(own, "chat", None))
    dialogue = Dialogue(template, TWO[:1], [SCHEMA])
    answers = run(dialogue, [(completion([65, 66, own.eos_token_id]), {"content": "It is 4."}, [TWO[2]])])
    assert dialogue.forks == ["user: the template writes something else behind other conversations"]
    assert dialogue.prompt == template.rendered(TWO[:3], [SCHEMA])
    assert [segment.sampled for row in dialogue.rows for segment in row] == [
        False,
        True,
    ]  # nothing is sampled behind it
    last = completion([67, own.eos_token_id])
    dialogue.answer(uncut(last), {"content": "It is 6."})
    assert [[segment.tokens for segment in row if segment.sampled] for row in dialogue.rows] == [
        [answers[0].tokens],
        [last.tokens],
    ]


@pytest.mark.parametrize("chat", [chats.CHATML, chats.MISTRAL])  # the second one forks
def test_an_extended_dialogue_leaves_the_shorter_one_as_it_is(chat):
    own = tokenizer(chat)
    start, same = (Dialogue(TurnTemplate(Encoder(own, "chat", None)), TWO[:1]) for _ in range(2))
    for one in (start, same):
        one.answer(uncut(completion([65, own.eos_token_id])), said("A"))
    before = list(start.prompt), start.rows, list(start.forks)
    longer = start.extended([TWO[2]])
    same.extend([TWO[2]])
    assert (longer.prompt, longer.forks) == (same.prompt, same.forks) and bool(longer.forks) == (chat is chats.MISTRAL)
    longer.answer(uncut(completion([66])), said("B"))
    assert (list(start.prompt), start.rows, start.forks) == before
    assert start.extended([TWO[2]]).prompt == same.prompt


class Known(Renderer):
    """Has the tokens behind a message of a user.

    Attributes:
        asked: the arguments of each call.
    """

    def __init__(self):
        self.asked = []

    def suffix(self, prompt, answer, messages, tools):
        self.asked.append((prompt, answer, messages, tools))
        return [65, 66] if messages[0]["role"] == "user" else None


def test_a_renderer_is_asked_first():
    own, known = tokenizer(chats.QWEN25), Known()
    encode = Encoder(own, "chat", None)
    bridge, dialogue = TurnTemplate(encode), Dialogue(TurnTemplate(encode, known), TWO[:1], [SCHEMA])
    first, second = completion([67, 68], ended=False), completion([69, own.eos_token_id])
    opening, result = list(dialogue.prompt), TOOL | {"name": "add", "tool_call_id": "call00000"}
    run(dialogue, [(first, said("x"), [TWO[2]]), (second, calling(1), [TOOL])])
    before = [*opening, 67, 68, 65, 66]
    behind = bridge.suffix([result], own.eos_token_id, [SCHEMA])
    assert dialogue.prompt == [*before, *second.tokens, *behind] and dialogue.forks == []
    assert known.asked == [(opening, [67, 68], [TWO[2]], [SCHEMA]), (before, second.tokens, [result], [SCHEMA])]


def test_a_renderer_gets_the_whole_answer_and_the_tools_of_the_run(tmp_path):
    """An answer that was stopped by force has three parts."""
    own, known = tokenizer(chats.QWEN25), Known()
    (tmp_path / "tools.json").write_text(json.dumps([SCHEMA]))
    dialogue = Dialogue(TurnTemplate(Encoder(own, "chat", None, str(tmp_path / "tools.json")), known), TWO[:1])
    start, end = (sampled_segment(completion([token])) for token in (67, 69))
    phrase = Segment([68], trains=False, continues=True)
    dialogue.answer(Answer([start, phrase, replace(end, continues=True)], Finish("stop", "x")), said("x"))
    dialogue.extend([TWO[2]])
    [(_, answer, _, tools)] = known.asked
    assert answer == [67, 68, 69] and tools == [SCHEMA]


def test_results_have_the_names_and_ids_of_their_calls():
    shown = (
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}"
        "{% else %}{{ m.name }}:{{ m.tool_call_id }}:{{ m.content }}{% endif %}<|end|>{% endfor %}"
    )
    own = tokenizer(chats.PHI3)
    own.chat_template = shown
    dialogue = Dialogue(TurnTemplate(Encoder(own, "chat", None)), TWO[:1])
    end = own.convert_tokens_to_ids("<|end|>")
    dialogue.answer(uncut(completion([65, end])), calling(1, 2))
    before = len(dialogue.prompt)
    dialogue.extend([TOOL | {"tool_call_id": "call00001"}, TOOL | {"name": "own"}, TOOL])
    assert own.decode(dialogue.prompt[before:]) == "add:call00001:4<|end|>own:call00001:4<|end|>:result002:4<|end|>"


def test_the_rows_become_rows_of_a_batch():
    own = tokenizer(chats.CHATML)
    dialogue = Dialogue(TurnTemplate(Encoder(own, "chat", None)), TWO[:1])
    answers = run(dialogue, [(completion([65, 66 + n], n == 0), said("x"), [TWO[2]]) for n in range(2)])
    [segments] = dialogue.rows
    row = to_row(Trajectory(segments, Finish("length", "x"), {}), group=0, unit=0, turns=True)
    sampled = row["turn"] > 0
    assert torch.equal(row["response_mask"], sampled)
    assert row["tokens"]["input_ids"][sampled].tolist() == answers[0].tokens + answers[1].tokens
    assert row["turn"][sampled].tolist() == [1, 1, 2, 2] and row["turn"][-1] == 2


@pytest.mark.parametrize("template", ["none", "words"])
def test_the_engine_samples_behind_the_tokens_of_the_row(template, tmp_path):
    """The log-probabilities of all turns are those of one forward over the row."""
    own, model = word_tokenizer(40), build()
    if template != "none":
        (tmp_path / "words.jinja").write_text("{% for m in messages %}w9 {{ m.content }}{{ eos_token }} {% endfor %}w8")
        own.add_special_tokens({"additional_special_tokens": ["w2"]})
    engine = hf_engine(model, own, 64)
    name = template if template == "none" else str(tmp_path / "words.jinja")
    dialogue = Dialogue(TurnTemplate(Encoder(own, name, None)), [user("w3 w4 w5")])
    turns = []
    for number in range(4):
        [[answer]] = engine.generate([Request(dialogue.prompt, [number])], sampling(max_new_tokens=4))
        turns.append(answer)
        dialogue.answer(uncut(answer), {"content": answer.text})
        dialogue.extend([user(f"w{6 + number} w3")])
    [segments] = dialogue.rows
    ids = torch.tensor([[token for segment in segments for token in segment.tokens]])
    logprobs = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    row = to_row(Trajectory(segments, None, {}), group=0, unit=0, turns=True)
    mask = row["response_mask"]
    assert int(mask.sum()) == sum(len(answer.tokens) for answer in turns) and dialogue.forks == []
    torch.testing.assert_close(row["rollout_logprobs"][mask].double(), logprobs[mask[1:]], atol=1e-5, rtol=0)


def test_messages_of_the_environment_have_media():
    one = family("qwen2_5_vl")
    encode = media_encoder(one)
    asked = [user([medium(one, 0), {"type": "text", "text": "how many?"}])]
    shown = [user([medium(one, 1), {"type": "text", "text": "and here?"}])]
    known = Known()
    dialogue = Dialogue(TurnTemplate(encode, known), asked)
    sampled = completion([*encode.encode(["two"])[0], encode.encode(["<eos>"])[0][0]])
    dialogue.answer(uncut(sampled), {"content": "two"})
    dialogue.extend(shown)
    whole = encode.prompt({"prompt": [*asked, said("two"), *shown]})
    assert dialogue.prompt == whole and dialogue.prompt.columns == whole.columns and dialogue.forks == []
    assert dialogue.prompt.media.keys() == whole.media.keys()
    assert all(torch.equal(tensor, whole.media[name]) for name, tensor in dialogue.prompt.media.items())
    assert known.asked == [], "a renderer knows no media"


def turn(name, kind, number):
    """An answer and the messages behind it: of a user, or the results of one call, or of one and two in turn."""
    if kind == "user":
        return said(f"answer{number}qz"), [user(f"question{number}qz")]
    count = 1 + (kind == "tools") * number % 2
    answer = calling(*(f"value{number}qz{place}" for place in range(count)), text=name == "deepseekv3")
    return answer, [
        {"role": "tool", "content": f"result{number}qz{place}", "name": "add", "tool_call_id": call["id"]}
        for place, call in enumerate(answer["tool_calls"])
    ]


def ends_of(name, kind):
    """The tokens behind which messages of a kind have a suffix, and None if it needs none."""
    template, found = TurnTemplate(trl.encoder(name)), []
    for end in (None, *trl.encoder(name).chat.added):
        try:
            template.suffix(turn(name, kind, 1)[1], end)
            found.append(end)
        except NoSuffix:
            continue
    return found


@trl.needs_trl
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("user", {"one row": 66}),
        ("tool", {"one row": 50, "forked": 4, "refused": 12}),
        ("tools", {"one row": 48, "forked": 6, "refused": 12}),
    ],
)
def test_no_sampled_token_changes_in_the_templates_of_trl(kind, expected):
    """Ten turns of random tokens, each cut or ended."""
    found, order = Counter(), random.Random(0)
    for name in sorted(set(trl.NAMES) - trl.NO_TEXT):
        try:
            ends, turns = ends_of(name, kind) or [None], []
            for number in range(TURNS):
                end = order.choice(ends)
                ids = [order.randrange(len(trl.tokenizer(name))) for _ in range(5)] + ([] if end is None else [end])
                turns.append((completion(ids, end is not None), *turn(name, kind, number)))
            dialogue = Dialogue(TurnTemplate(trl.encoder(name)), TWO[:1])
            run(dialogue, turns)
        except ValueError:
            found["refused"] += 1
        else:
            assert len(dialogue.forks) in (0, TURNS)
            found["forked" if dialogue.forks else "one row"] += 1
    assert found == expected


def follows(name, kind):
    """Whether a dialogue has the text that the template renders, for ten turns of answers as the template writes them,
    up to any of the special tokens behind them; or "rewritten", if the template does not render what stood before."""
    encode, messages = trl.encoder(name), TWO[:1]
    dialogue = Dialogue(TurnTemplate(encode), messages)
    special = re.compile("|".join(map(re.escape, sorted(encode.chat.added.values(), key=len, reverse=True))))
    for number in range(TURNS):
        answer, following = turn(name, kind, number)
        before = trl.tokenizer(name).decode(dialogue.prompt)
        messages = [*messages, answer, *following]
        whole = encode.chat.render(messages, None, True)
        if not whole.startswith(before):
            return "rewritten"
        body = re.compile(rf"(answer|value){number}qz0?").search(whole, len(before))
        if body is None:
            return "no calls"
        body = body.end()
        header = whole.index(following[0]["content"], body)
        closing = list({match[0]: match.end() for match in [*special.finditer(whole, body, header)][::-1]}.values())
        ids = encode.encode([whole[len(before) : closing[number % len(closing)]]])[0]
        size = len(dialogue.prompt) + len(ids)
        dialogue.answer(uncut(completion(ids)), answer)
        dialogue.extend(following)
        assert trl.tokenizer(name).decode(dialogue.prompt) == whole, name
        suffix = dialogue.prompt[size:]
        assert encode.encode([whole])[0][-len(suffix) :] == suffix, name
        assert not dialogue.forks
    return "equal"


@trl.needs_trl
def test_the_text_is_the_templates_own_where_it_does_not_rewrite():
    names = [name for name in trl.NAMES if name not in trl.NO_TEXT]
    assert Counter(follows(name, "user") for name in names) == {"equal": 51, "rewritten": 15}
    calls = [name for name in names if outcome(name, "tool") == "bridged"]
    assert Counter(follows(name, "tool") for name in calls) == {"equal": 36, "rewritten": 8, "no calls": 6}
