"""Held-out pairs: numbers by hand, the same on any number of ranks."""

import math
from contextlib import contextmanager

import pytest
import torch

from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.evaluation.base import EvaluationContext
from rft.evaluation.preference import PairEvaluator

ROWS = [  # scores are sums of digits: 3 over 1, 2 over 5, a tie
    {"prompt": "a", "chosen": "12", "rejected": "1"},
    {"prompt": "bb", "chosen": "2", "rejected": "5"},
    {"prompt": "c", "chosen": "4", "rejected": "31"},
]


@contextmanager
def silent(name, total):
    yield lambda done: None


def evaluator(world, rows=ROWS):
    tokenizer = characters(alphabet="0123456789abc")
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    digits = torch.tensor([int(token) if token.isdigit() else 0 for token in tokens])

    def scores(batch):
        assert (
            batch["loss_mask"].any(1).all() and (batch["loss_mask"] <= batch["tokens", "attention_mask"].bool()).all()
        )
        return digits[batch["tokens", "input_ids"]].float()

    return PairEvaluator(EvaluationContext(world, Encoder(tokenizer, "none", None), {"held": rows}), scores, None)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_accuracy_and_margin_by_hand_on_any_number_of_ranks(ranks, size):
    for numbers, texts in ranks(size, lambda world: evaluator(world).run(silent)):
        assert numbers == pytest.approx(
            {
                "eval/held/accuracy": 1 / 3,
                "eval/held/accuracy_stderr": 1 / 3,
                "eval/held/margin": (2 - 3 + 0) / 3,
                "eval/held/margin_stderr": math.sqrt((4 + 9 - 1 / 3) / 2 / 3),
            }
        )
        assert texts["held"][:2] == [
            {"prompt": "a", "response": "12", "score": 3.0},
            {"prompt": "a", "response": "1", "score": 1.0},
        ]
        assert [row["score"] for row in texts["held"]] == [3, 1, 2, 5, 4, 4]


@pytest.mark.parametrize("size", [1, 2])
def test_an_export_gets_the_moments_of_the_scores_of_all_pairs(ranks, size):
    def entries(world):
        made = evaluator(world)
        made.run(silent)
        return made.config_entries()

    scores = [3, 1, 2, 5, 4, 4]  # the mean is 19/6, the sum of squares 71
    std = math.sqrt((71 - 19**2 / 6) / 5)
    for found in ranks(size, entries):
        assert found == {"mean": pytest.approx(sum(scores) / 6), "std": pytest.approx(std)}
