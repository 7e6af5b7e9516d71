"""Weights that data give: of messages, whose tokens have them, and of rows."""

import logging
import re

import pytest
import torch

from rft.batch.columns import GIVEN_COLUMNS
from rft.data.encode.encoder import Encoder
from rft.data.given.pairs import LabelledSource, PairSource
from rft.data.given.supervised import DatasetSource, TextSource
from rft.distributed import SINGLE_PROCESS
from rft.metrics import Metrics
from tests.data import chat_texts as chats
from tests.data.contexts import source_context
from tests.data.encode.test_masks import said, tokenizer, user


def chat(*weights):
    """A question for each answer, with these marks."""
    messages = []
    for number, marks in enumerate(weights):
        messages += [user("What is 2+2?"), said(f"It is {number}.") | marks]
    return messages


def draw(kind, rows, encoder=None, **options):
    encoder = encoder or Encoder(tokenizer(chats.CHATML), "chat", None)
    context = source_context(SINGLE_PROCESS, encoder, rows, len(rows), 0)
    return kind(kind.Options(**options), context).next(Metrics())


def test_a_token_has_the_weight_of_its_message():
    messages = chat({"weight": 0.5}, {}, {"train": False}, {"loss_mask": 2, "trainable": True})
    batch = draw(TextSource, [{"messages": messages}], response="messages")
    plain = draw(TextSource, [{"messages": chat({}, {}, {}, {})}], response="messages")
    assert batch["tokens", "input_ids"].tolist() == plain["tokens", "input_ids"].tolist()
    mask, answers = plain["response_mask"][0], []
    for place in mask.nonzero()[:, 0].tolist():
        if not mask[place - 1]:
            answers.append([])
        answers[-1].append(batch["token_weights"][0, place].item())
    assert [set(weights) for weights in answers] == [{0.5}, {1.0}, {0.0}, {2.0}]
    assert batch["token_weights"].dtype == torch.float32
    assert torch.equal(batch["response_mask"], batch["token_weights"] > 0)
    assert torch.equal(plain["token_weights"], plain["response_mask"].float())


@pytest.mark.parametrize(
    ("kind", "options", "rows_each"),
    [
        (DatasetSource, {"response": "good"}, 1),
        (PairSource, {"chosen": "good", "rejected": "bad", "margin": None}, 2),
        (LabelledSource, {"response": "good", "label": "right"}, 2),
    ],
)
def test_all_rows_of_a_text_have_its_weight(kind, options, rows_each):
    weights = {"a": 0.25, "b": 3, "c": "0"}
    rows = [{"prompt": p, "good": "1", "bad": "2", "right": p == "a", "w": w} for p, w in weights.items()]
    batch = draw(kind, rows, **options, weight="w")
    expected = [float(weights[row["prompt"]]) for row in batch["fields"].tolist()]
    assert batch["row_weights"].tolist() == expected and len(expected) == 3 * rows_each
    facts = kind.Options(**options, weight="w").facts()
    assert "w" in facts.fields and set(batch.keys()) == set(facts.writes) >= {*GIVEN_COLUMNS, "row_weights"}
    assert "row_weights" not in kind.Options(**options, weight=None).facts().writes


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        (
            {"weight": -0.5},
            "has weight=-0.5: a mark is 0 or false, which takes it out, true, or the weight of its tokens",
        ),
        ({"train": "false"}, "has train='false': a mark is 0 or false"),
        ({"loss": 1, "trainable": False}, "has loss=1, trainable=False, which differ; keep one of the marks"),
    ],
)
def test_a_mark_that_is_not_understood_is_refused(marks, message):
    encoder = Encoder(tokenizer(chats.CHATML), "chat", None)
    with pytest.raises(ValueError, match=re.escape(message)):
        encoder.weighted_example({"response": chat(marks)})


@pytest.mark.parametrize("weight", [-1, "much", None, float("nan"), float("inf")])
def test_a_row_without_a_weight_is_refused(weight):
    message = f"algorithm.source.weight=w: {weight!r} in that field of a row is not a number from 0 on; name another"
    with pytest.raises(ValueError, match=re.escape(message)):
        draw(DatasetSource, [{"prompt": "a", "response": "b", "w": weight}], response="response", weight="w")


def test_a_score_has_no_weights_of_tokens():
    encoder = Encoder(tokenizer(chats.CHATML), "chat", None, scored=True)
    for weight, counts in ((1, True), (0.5, False)):
        row = {"prompt": [user("What is 2+2?")], "response": [said("It is 4.") | {"weight": weight}]}
        if counts:
            encoder.weighted_example(row)
            continue
        with pytest.raises(ValueError, match=r"a score is of the whole row; remove it, or give the row a weight"):
            encoder.weighted_example(row)


def test_a_flag_that_is_no_mark_is_named_once(caplog):
    caplog.set_level(logging.WARNING)
    encoder = Encoder(tokenizer(chats.CHATML), "chat", None)
    for _ in range(2):
        encoder.example({"response": chat({"learnt": False, "timestamp": 3}, {"learnt": True})})
    [record] = [record for record in caplog.records if "learnt" in record.getMessage()]
    assert "a number or a flag 'learnt', which the loss does not read; it reads weight," in record.getMessage()
    assert not any("timestamp" in record.getMessage() for record in caplog.records)
