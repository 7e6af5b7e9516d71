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


@pytest.mark.parametrize(
    ("response", "answer", "score", "found"),
    [
        ("It is so. Verdict: **Yes**", "Yes", 1.0, "yes"),
        ("Verdict: yes? No.\nverdict: no", "Yes", 0.0, "no"),
        ("VERDICT: B", "b", 1.0, "b"),
        ("Yes", "Yes", 0.0, None),
    ],
)
def test_verdict(response: str, answer: str, score: float, found: str | None) -> None:
    rule = REWARDS.build({"name": "verdict", "pattern": r"(?i)verdict:\W*(\w+)"}, "reward.terms.a")
    assert rule.facts.reads == ("answer",)
    assert rule(response, {"answer": answer}) == score
    assert rule.call("extract", response) == found


@pytest.mark.parametrize("answer", ["yes.", "not sure", "?"])
def test_a_verdict_that_the_pattern_takes_from_no_response_is_refused(answer: str) -> None:
    rule = REWARDS.build({"name": "verdict", "pattern": r"(?i)verdict:\W*(\w+)"}, "reward.terms.a")
    rule.call("gold", {"answer": "Yes"})
    with pytest.raises(ValueError, match=r"^the field 'answer' is .*, which the pattern .* takes from no response"):
        rule.call("gold", {"answer": answer})
    own = REWARDS.build({"name": "verdict", "pattern": r"\[\[(.)\]\]"}, "reward.terms.a")
    own.call("gold", {"answer": answer})  # what such a response looks like is not known


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("(", r"pattern: '\(' is not a regular expression"), ("Yes|No", r"pattern: 'Yes\|No' needs one group")],
)
def test_a_verdict_without_a_group_is_refused_by_name(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^reward\.terms\.a\.{message}"):
        REWARDS.build({"name": "verdict", "pattern": pattern}, "reward.terms.a")
