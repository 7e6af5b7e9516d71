"""Held-out answers in steps: numbers by hand, of the whole and of each source, the same on any number of ranks."""

import math
from contextlib import contextmanager

import pytest
import torch

from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.data.encode.truncation import TextLimit
from rft.data.given.steps import StepSource
from rft.distributed import SINGLE_PROCESS
from rft.evaluation.base import EvaluationContext
from rft.evaluation.estimators import interval
from rft.evaluation.process import StepEvaluator, first_wrong

ROWS = [  # the logit of a step is its digit less 5
    {"prompt": "a", "completions": ["9", "1"], "labels": [True, False], "data_source": "x"},
    {"prompt": "bb", "completions": ["8", "6", "7"], "labels": [True, False, 0.2], "data_source": "x"},
    {"prompt": "c", "completions": ["7"], "labels": [1], "data_source": "y"},
]


@contextmanager
def silent(name, total):
    yield lambda done: None


def evaluator(world, rows=ROWS, limit=None):
    tokenizer = characters(alphabet="0123456789abc\n")
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    digits = torch.tensor([float(token) - 5 if token.isdigit() else 99.0 for token in tokens])

    def scores(batch):
        logits = digits[batch["tokens", "input_ids"]].roll(1, 1)  # the separator tells of the digit before it
        return torch.where(batch["loss_mask"], logits, 0.0)

    encoder = Encoder(tokenizer, "none", None)
    encoder.text_limit = limit
    source = StepSource.Options(steps="texts", labels="marks", separator="\n")
    return StepEvaluator(EvaluationContext(world, encoder, {"held": rows}), scores, source)


def p(digit):
    return 1 / (1 + math.exp(5 - digit))


def test_steps_behind_a_cut_do_not_count():
    limit = TextLimit(6, "truncate", "data.max_tokens=6", frozenset())  # the third step of `bb` ends at token 8
    numbers, texts = evaluator(SINGLE_PROCESS, limit=limit).run(silent)
    assert numbers["eval/held/accuracy"] == pytest.approx(4 / 5)
    assert [len(text["steps"]) for text in texts["held"]] == [2, 2, 1]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_numbers_by_hand_on_any_number_of_ranks(ranks, size):
    for numbers, texts in ranks(size, lambda world: evaluator(world).run(silent)):
        means = {name.removeprefix("eval/held/"): value for name, value in numbers.items() if "stderr" not in name}
        assert means == pytest.approx(
            {
                "accuracy": 4 / 6,
                "first_error": 2 / 3,  # in the second answer an error is not found
                "probability_good": (p(9) + p(8) + p(7)) / 3,
                "probability_bad": (p(1) + p(6) + p(7)) / 3,
                "x/accuracy": 3 / 5,
                "x/first_error": 1 / 2,
                "x/probability_good": (p(9) + p(8)) / 2,
                "x/probability_bad": (p(1) + p(6) + p(7)) / 3,
                "y/accuracy": 1.0,
                "y/first_error": 1.0,
                "y/probability_good": p(7),
            },
            rel=1e-6,
        )
        assert texts["held"][1] == {
            "prompt": "bb",
            "response": "8\n6\n7",
            "score": pytest.approx(p(6)),
            "steps": pytest.approx([p(8), p(6), p(7)]),
            "labels": [1.0, 0.0, 0.2],
        }


def test_intervals_count_steps(ranks):
    [sets] = ranks(1, lambda world: evaluator(world).evaluate(silent))
    assert interval(sets["held"].by_source()["x"]["accuracy"]) == interval([1.0, 1.0, 1.0, 0.0, 0.0])


def test_the_first_wrong_step():
    assert (first_wrong([0.9, 0.5, 0.1]), first_wrong([0.6]), first_wrong([0.0])) == (1, None, 0)


def test_labels_that_do_not_fit_are_refused_by_the_set(ranks):
    with pytest.raises(ValueError, match=r"^data\.eval\.held: the field labels: a row has 1 labels for 2 steps"):
        ranks(1, lambda world: evaluator(world, [ROWS[0] | {"labels": [True]}]).run(silent))
