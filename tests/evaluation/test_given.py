"""Metrics of given responses, by hand, on one rank and on several."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from rft.batch.scores import Scores
from rft.evaluation.given import GivenAnswers, GivenEvaluator
from tests.evaluation.test_generation import ROWS, accuracy_terms, extract, score

ANSWERS = [GivenAnswers(text, 3, [text, "2"]) for text in ("0", "no", "2", "no", "no")]


def evaluate(world, answers):
    @contextmanager
    def silent(name, total):
        yield lambda done: None

    def scores(texts, rows):
        return Scores.plain(*score(texts, rows))

    reward = SimpleNamespace(score=scores, extract=extract, accuracy="right", accuracy_terms=accuracy_terms)
    return GivenEvaluator(world, {"held": ROWS}, {"held": answers}, reward, [1, 2], [2]).run(silent)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_numbers_by_hand(size, ranks):
    for numbers, texts in ranks(size, lambda world: evaluate(world, ANSWERS)):
        assert numbers["eval/held/accuracy"] == 0.4 and numbers["eval/held/length"] == 3.0
        assert numbers["eval/held/form"] == (1 + 0.5 + 1 + 0.5 + 0.5) / 5
        assert numbers["eval/held/mean@2"] == (0.5 + 0 + 1 + 0 + 0) / 5
        assert numbers["eval/held/pass@2"] == 0.4
        assert numbers["eval/held/maj@2"] == (0.5 + 0 + 1 + 0 + 0) / 5, "a tie of 0 and 2 counts half"
        assert [row["score"] for row in texts["held"]] == [1, 0, 1, 0, 0]


def test_samples_alone_and_unknown_tokens(ranks):
    alone = [GivenAnswers(None, None, one.samples) for one in ANSWERS]
    [(numbers, texts)] = ranks(1, lambda world: evaluate(world, alone))
    assert numbers["eval/held/mean@2"] == 0.3 and texts == {"held": []}
    assert not [name for name in numbers if "accuracy" in name or "length" in name or "form" in name]
    unknown = [GivenAnswers(one.response, None, []) for one in ANSWERS]
    [(numbers, _)] = ranks(1, lambda world: evaluate(world, unknown))
    assert numbers["eval/held/accuracy"] == 0.4 and "eval/held/length" not in numbers
