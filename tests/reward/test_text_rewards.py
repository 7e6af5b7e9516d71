"""Rewards that look at the text alone."""

import pytest

from rft.reward import REWARDS


@pytest.mark.parametrize(
    ("response", "answer", "strip", "score"),
    [
        ("abc", "abc", False, 1.0),
        (" abc\n", "abc", True, 1.0),
        ("abc", " abc\n", True, 1.0),
        (" abc", "abc", False, 0.0),
        ("abcd", "abc", True, 0.0),
        ("a bc", "abc", True, 0.0),
        ("ABC", "abc", True, 0.0),
        ("", "abc", True, 0.0),
        ("5", 5, True, 1.0),
    ],
)
def test_exact_match(response: str, answer: object, strip: bool, score: float) -> None:
    rule = REWARDS.build({"name": "exact_match", "strip": strip}, "reward.terms.a")
    assert rule.facts.reads == ("answer",)
    assert rule(response, {"answer": answer}) == score


@pytest.mark.parametrize(
    ("match", "response", "score"),
    [
        ("whole", "<a>1</a>", 1.0),
        ("whole", "x <a>1</a>", 0.0),
        ("anywhere", "x <a>1</a> y", 1.0),
        ("anywhere", "x", 0.0),
    ],
)
def test_format(match: str, response: str, score: float) -> None:
    rule = REWARDS.build({"name": "format", "pattern": r"<a>\d</a>", "match": match}, "reward.terms.a")
    assert rule.facts.reads == ()
    assert rule(response, {}) == score
