"""Terms by data source: which rows a term scores, and what is the accuracy there."""

import math

import pytest

from tests.reward.reward_of import reward_of

EXACT = {"name": "exact_match", "weight": 1.0, "strip": True}
CHOICE = {"name": "choice", "weight": 2.0, "letters": "ABC", "markers": ["answer:"], "reasoning": []}
SHORT = {"name": "format", "weight": 0.5, "pattern": ".{1,3}", "match": "whole"}
TERMS = {"exact": EXACT, "choice": CHOICE, "short": SHORT}
ROUTE = {"sums": ["exact", "short"], "quiz": ["choice"]}
ROWS = [
    {"data_source": "sums", "answer": "4"},
    {"data_source": "quiz", "answer": "B"},
    {"data_source": "sums", "answer": "5"},
    {"data_source": "quiz", "answer": "A"},
]


def test_a_row_is_scored_by_the_terms_of_its_source():
    reward = reward_of(TERMS, "exact", route=ROUTE)
    responses = ["4", "B", "4", "answer: C"]
    found = reward.score(responses, ROWS)
    assert found.total.tolist() == [1.5, 2.0, 0.5, 0.0]
    expected = {"exact": [1, None, 0, None], "choice": [None, 1, None, 0], "short": [1, None, 1, None]}
    for name, values in expected.items():
        assert [None if math.isnan(value) else value for value in found.terms[name].tolist()] == values
    assert found.unscored == [{}] * 4, "a term that does not score a row is not missing there"
    accuracies = found.accuracies(reward.accuracy_terms(ROWS)).tolist()
    assert accuracies == [1, 1, 0, 0], "exact, or the first term of the source"
    assert reward.extract(responses, ROWS) == ["4", "B", "4", "C"]


def test_other_holds_every_source_without_an_entry():
    reward = reward_of(TERMS, "exact", route={"quiz": ["choice"], "other": ["exact", "short"]})
    rows = [{"data_source": "new", "answer": "4"}, {"answer": "4"}]
    assert reward.score(["4", "4"], rows).total.tolist() == [1.5, 1.5]


def test_the_entry_of_a_source_is_that_of_the_sources_below_it():
    route = {"quiz": ["choice"], "quiz/sums/easy": ["exact"], "other": ["short"]}
    reward = reward_of(TERMS, "exact", route=route)
    sources = ["quiz/art", "quiz/sums", "quiz/sums/easy", "quiz/sums/easy/1", "quizzes", "a/quiz"]
    rows = [{"data_source": source, "answer": "A"} for source in sources]
    assert reward.score(["A"] * 6, rows).total.tolist() == [2.0, 2.0, 1.0, 1.0, 0.5, 0.5]


def test_a_row_needs_the_fields_of_its_own_terms():
    number = {"name": "gsm8k", "weight": 1.0, "method": "strict", "markers": ["####"]}
    reward = reward_of({"n": number, "short": SHORT}, "n", route={"sums": ["n"], "free": ["short"]})
    assert reward.fields == ()
    reward.check_row({"data_source": "free"})
    with pytest.raises(ValueError, match=r"^the row has no field 'answer', which reward\.terms\.n reads"):
        reward.check_row({"data_source": "sums"})
    with pytest.raises(ValueError, match=r"^the field 'data_source' is 'more', which has no entry in reward\.route"):
        reward.check_row({"data_source": "more"})


@pytest.mark.parametrize(
    ("route", "changes", "message"),
    [
        ({"a": ["exakt"]}, {}, r"^reward\.route\.a: 'exakt' is none of reward\.terms.*did you mean exact"),
        ({"a": []}, {}, r"^reward\.route\.a: name at least one"),
        ({"a": ["exact"], "b": ["short"]}, {}, r"^reward\.route: no source has the term 'choice'"),
        (ROUTE, {"choice": CHOICE | {"gate": "short"}}, r"^reward\.terms\.choice\.gate=short: .* has a source with"),
    ],
)
def test_routes_that_make_no_sense_are_refused(route, changes, message):
    with pytest.raises(ValueError, match=message):
        reward_of(TERMS | changes, "exact", route=route)
