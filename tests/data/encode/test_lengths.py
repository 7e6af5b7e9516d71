"""Prompts that are too long are dropped, and the run says so, and how many answers train."""

import json
import re
from collections import Counter

import pytest
import torch

from rft.data.base import GivenTexts
from rft.data.encode.encoder import Encoder
from rft.data.encode.fates import FATES, explain
from rft.data.encode.lengths import Lengths, count_tokens, limit_prompts
from rft.data.encode.limits import fit_texts
from rft.data.encode.tokenizer import characters
from rft.data.encode.truncation import PromptLimit, TextLimit
from rft.data.given.pairs import PairSource
from rft.data.given.supervised import DatasetSource, TextSource
from rft.data.rows.mixture import Mixed
from rft.distributed import SINGLE_PROCESS
from rft.setup.assembly import Job
from tests.data import chat_texts as chats
from tests.data.encode.test_masks import CALLING, THINKING, TWO, tokenizer, user
from tests.data.test_fingerprint_cache import Counting

ENCODER = Encoder(characters(alphabet="0123456789="), "none", None, None, "response")
ROWS = [{"prompt": "1" * length} for length in (3, 9, 1, 5, 5)]


def drop(rows, most):
    said: list[str] = []
    counts = Lengths(SINGLE_PROCESS, ENCODER, None).prompts(rows)
    limit = None if most is None else PromptLimit(most, "drop")
    left, counts = limit_prompts(rows, counts, limit, "data.train", said.append)
    assert counts.tolist() == [len(row["prompt"]) for row in left]
    return left, said


def test_longer_prompts_are_dropped_and_the_others_stay_in_order():
    rows, said = drop(ROWS, 4)
    assert list(rows) == [ROWS[0], ROWS[2]] and len(rows) == 2
    assert said == [
        "data.train: 3 of 5 prompts have more tokens than data.max_prompt_tokens=4; the longest has 9. They are dropped"
    ]


@pytest.mark.parametrize("most", [None, 9])
def test_nothing_is_said_where_nothing_is_dropped(most):
    assert drop(ROWS, most) == (ROWS, [])


def test_nothing_left_is_an_error():
    with pytest.raises(
        ValueError, match=r"data\.train: 5 of 5 prompts .* has 9, the shortest 1, and no row is left; r"
    ):
        drop(ROWS, 0)


def test_a_mixture_keeps_its_parts():
    mixed = Mixed({"a": ROWS[:2], "b": ROWS[2:]}, {"a": 1.0, "b": 3.0})
    rows, _ = drop(mixed, 4)
    assert isinstance(rows, Mixed) and rows.weights == mixed.weights
    assert list(rows) == [ROWS[0] | {"data_source": "a"}, ROWS[2] | {"data_source": "b"}]
    with pytest.raises(ValueError, match=r"data\.train\.parts\.a: all rows have more tokens than data\.max_prompt"):
        drop(mixed, 1)


def test_a_run_says_what_it_drops_of_each_set(tiny, tmp_path, capsys):
    """Prompts are "reverse <digits>=": nine tokens and the digits."""
    config = tiny("algorithm=sft", "steps=1", "data.max_prompt_tokens=11", "data.train.length=[1,3]")
    assert Job(config).fit("") >= 0.0
    said = " ".join(capsys.readouterr().out.split())
    for key, total in (("data.train", 64), ("data.eval.heldout", 8)):
        found = re.search(
            rf"{re.escape(key)}: (\d+) of {total} prompts have more tokens than data.max_prompt_tokens=11; ", said
        )
        assert found and 0 < int(found[1]) < total
        assert said[found.end() :].startswith("the longest has 12.")
    rows = [json.loads(line) for file in (tmp_path / "run" / "trajectories").iterdir() for line in file.open()]
    assert rows and all(len(row["prompt"]) <= 11 for row in rows)
    with pytest.raises(ValueError, match=r"data\.train: 64 of 64 prompts .*no row is left"):
        Job(config | {"data": config["data"] | {"max_prompt_tokens": 9}}).fit("")


CHATS = [{"messages": messages} for messages in (CALLING, THINKING, TWO, [TWO[0], TWO[1] | {"weight": 0}, *TWO[2:]])]


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_knows_how_many_answers_train_and_why_others_do_not(size, ranks, tmp_path):
    """On any number of ranks, and where the counts are cached."""

    def count(world):
        encoder = Counting(tokenizer(chats.QWEN3), "chat", None)
        given = GivenTexts(TextSource, TextSource.Options(response="messages"))
        texts = Lengths(world, encoder, str(tmp_path)).texts(given, CHATS)
        return texts.answers.tolist(), encoder.asked

    answers = [[2, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 0], [1, 0, 0, 1]]
    first, again = ranks(size, count), ranks(size, count)
    assert [found for found, _ in [*first, *again]] == [answers] * 2 * size
    assert sum(encoded for _, encoded in first) == 4 and not any(encoded for _, encoded in again)
    assert explain([5, 0, 2, 1]) == (
        "5 of 8 answers of the assistant are in the loss; 2 are rewritten by the chat template where messages follow "
        "them, such as without a thought, so the model never writes them as they stand (add rows that end with them); "
        "1 are marked (weight, loss_mask, train, loss, trainable)"
    )


@pytest.mark.parametrize(
    ("row", "train_on", "message"),
    [
        ({"prompt": TWO[:3], "response": TWO[3:]}, "response", "1 of 2 answers of the assistant are in the loss; 1 st"),
        ({"prompt": TWO[:3], "response": "It is 6."}, "response", "1 of 2 answers of the assistant are in the loss; 1"),
        ({"response": TWO}, "last", "1 of 2 answers of the assistant are in the loss; 1 stand before the answer of"),
        ({"prompt": TWO[:3], "response": TWO[3:]}, "assistant", None),
        ({"prompt": TWO[0]["content"], "response": "It is 4."}, "response", None),
        ({"prompt": TWO[:1], "response": TWO[1:2]}, "response", None),
        ({"response": TWO}, "all", None),
    ],
)
def test_answers_before_the_response_are_counted(row, train_on, message):
    encoder = Encoder(tokenizer(chats.CHATML), "chat", None, train_on=train_on)
    encoder.answers = Counter()
    encoder.example(row)
    assert (explain([encoder.answers[fate] for fate in FATES]) or "None").startswith(str(message))


def test_a_run_says_how_many_answers_of_a_set_are_in_the_loss(tmp_path):
    """Of the rows that stay: the last one is too long."""
    said: list[str] = []
    encoder = Encoder(tokenizer(chats.CHATML), "chat", None)
    rows = [{"prompt": TWO[:3], "response": TWO[3:]}, {"prompt": [user("a" * 200), *TWO[1:3]], "response": TWO[3:]}]
    limit = TextLimit(150, "drop", "data.max_tokens=150", frozenset())
    given = GivenTexts(DatasetSource, DatasetSource.Options(response="response"))
    kept, _ = fit_texts("data.train", rows, Lengths(SINGLE_PROCESS, encoder, None), limit, given, said.append)
    assert list(kept) == rows[:1]
    assert said[-1] == (
        "data.train: 1 of 2 answers of the assistant are in the loss; 1 stand before the answer of their row "
        "(data.train_on=assistant trains them, too)"
    )


def reply(content):
    return [{"role": "assistant", "content": content}]


PAIRS = [
    {"prompt": [user("1 + 1?")], "chosen": chosen, "rejected": rejected}
    for chosen, rejected in (("2", "3"), ("2", "2"), (reply("2"), reply("2")), (reply("2"), reply("")), ("22", "2"))
]
PAIR = GivenTexts(PairSource, PairSource.Options(chosen="chosen", rejected="rejected", margin=None))


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_knows_which_pairs_have_equal_responses(size, ranks, tmp_path):
    """On any number of ranks, and where the counts are cached."""

    def count(world):
        encoder = Counting(tokenizer(chats.CHATML), "chat", None)
        texts = Lengths(world, encoder, str(tmp_path)).texts(PAIR, PAIRS)
        return texts.equal.tolist(), encoder.asked

    first, again = ranks(size, count), ranks(size, count)
    assert [found for found, _ in [*first, *again]] == [[0, 1, 1, 0, 0]] * 2 * size
    assert sum(encoded for _, encoded in first) == 2 * len(PAIRS) and not any(encoded for _, encoded in again)


def test_responses_with_other_media_are_not_equal():
    def text(media, chosen):
        tokens = {"input_ids": torch.tensor([1, 2, 3])}
        return {"tokens": tokens, "response_mask": torch.tensor([False, False, True]), "chosen": chosen} | media

    picture, other = ({"media": {"pixel_values": torch.full((2, 2), value)}} for value in (0.0, 1.0))
    found = [count_tokens([text(picture, True), text(media, False)], ENCODER)[2] for media in (picture, other, {})]
    assert found == [True, False, False]


def test_a_run_says_how_many_pairs_have_equal_responses():
    """Of the pairs that stay: the last one is too long."""

    def said(rows):
        messages: list[str] = []
        encoder, limit = Encoder(tokenizer(chats.CHATML), "chat", None), TextLimit(150, "drop", "", frozenset())
        fit_texts("data.train", rows, Lengths(SINGLE_PROCESS, encoder, None), limit, PAIR, messages.append)
        return messages[-1:]

    long = {"prompt": "1 + 1?", "chosen": "2" * 200, "rejected": "2" * 200}
    assert said([*PAIRS, long]) == [
        "data.train: 2 of 5 pairs have two equal responses, which hold no preference and count as other pairs do; "
        "remove them"
    ]
    assert said(PAIRS[:1]) == []
