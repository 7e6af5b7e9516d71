"""What becomes of a call that fails, is too slow or is repeated; numbers worked by hand."""

import pytest

from rft.errors import FunctionError
from tests.reward import user_functions
from tests.reward.reward_of import reward_of

MODULE = "tests.reward.user_functions"
EXACT = {"name": "exact_match", "weight": 1.0, "strip": True}
ROWS = [{"answer": "a"}] * 4


def node(name, call, **options):
    return {"function": f"{MODULE}:{name}", "weight": 1.0, "call": call, **options}


def test_a_failure_drops_the_row_the_group_or_becomes_a_number():
    texts = ["a", "raise", "aaa", "aa"]
    found = reward_of({"a": node("by_command", {"failed": "drop_row"})}, "a").score(texts, ROWS)
    assert found.total[[0, 2, 3]].tolist() == [1.0, 3.0, 2.0] and found.total[1].isnan()
    assert found.terms["a"][1].isnan() and found.unscored == [{}, {"a": "KeyError"}, {}, {}]
    assert not found.whole_group.any()

    found = reward_of({"a": node("by_command", {"failed": "drop_group"})}, "a").score(texts, ROWS)
    assert found.whole_group.tolist() == [False, True, False, False]
    assert found.drop_groups([2, 2]).total.isnan().tolist() == [True, True, False, False]

    found = reward_of({"a": node("by_command", {"failed": -0.5})}, "a").score(texts, ROWS)
    assert found.total.tolist() == [1.0, -0.5, 3.0, 2.0] and found.unscored[1] == {"a": "KeyError"}


def test_a_failure_stops_the_run_by_default_and_names_the_line():
    with pytest.raises(FunctionError) as caught:
        reward_of({"a": node("by_command", {})}, "a").score(["a", "raise"], ROWS[:2])
    assert "the reward term 'a' failed on row 1, response 'raise'" in str(caught.value)
    assert "user_functions.py:" in str(caught.value) and "KeyError: 'no such thing'" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_every_term_leaves_unscored_what_it_cannot_score():
    """Where it would stop the run, drop the group, or give a number."""
    calls = {"a": {}, "b": {"tries": 1, "failed": "drop_row"}, "c": {"failed": "drop_group"}, "d": {"failed": 0.5}}
    reward = reward_of({name: node("by_command", call) for name, call in calls.items()}, "a")
    reward.leave_unscored()
    found = reward.score(["a", "raise"], ROWS[:2])
    assert found.unscored == [{}, dict.fromkeys(calls, "KeyError")] and not found.whole_group.any()
    assert all(values[0] == 1.0 and values[1].isnan() for values in found.terms.values())


def test_the_first_failure_of_each_reason_is_logged_with_its_line(caplog):
    reward = reward_of({"a": node("by_command", {"failed": "drop_row"})}, "a")
    for _ in range(2):
        reward.score(["a", "raise", "raise", "exit"], ROWS)
    first, second = caplog.messages
    assert first.startswith("the reward term 'a' gave no score to response 'raise': ") and "user_functions.py:" in first
    assert "KeyError: 'no such thing'" in first and "SystemExit" in second


def test_a_term_without_weight_drops_no_row():
    terms = {"right": EXACT, "a": node("by_command", {"failed": "drop_group"}) | {"weight": 0.0}}
    found = reward_of(terms, "right").score(["a", "raise"], ROWS[:2])
    assert found.total.tolist() == [1.0, 0.0] and found.terms["a"][1].isnan() and not found.whole_group.any()


@pytest.mark.parametrize("text", ["text", "nan", "inf", "1e16"])
def test_a_value_that_is_no_score_is_a_failure(text):
    found = reward_of({"a": node("as_it_says", {"failed": "drop_row"})}, "a").score(["0.5", text], ROWS[:2])
    assert found.total[0] == 0.5 and found.total[1].isnan() and found.unscored == [{}, {"a": "no_score"}]
    with pytest.raises(FunctionError, match=r"the reward term 'a' gave 1 scores that are"):
        reward_of({"a": node("as_it_says", {})}, "a").score(["0.5", text], ROWS[:2])


def test_a_failed_call_is_repeated(monkeypatch):
    monkeypatch.setattr("rft.reward.call.PAUSES_S", (0.0, 0.0))
    for tries, scored in ((2, False), (3, True)):
        user_functions.FAILURES.clear()
        found = reward_of({"a": node("fails_twice", {"tries": tries, "failed": "drop_row"})}, "a").score(
            ["x"], ROWS[:1]
        )
        assert found.total.isfinite().tolist() == [scored]
        assert {"x": tries} == user_functions.FAILURES
        assert found.unscored == [{} if scored else {"a": "ConnectionError"}]


def test_async_functions_run_at_the_same_time_up_to_the_concurrency():
    user_functions.ACTIVE = user_functions.MOST = 0
    call = {"concurrency": 3, "deadline_s": 0.5, "failed": "drop_row"}
    texts = ["1", "hang", *"2345678"]
    found = reward_of({"a": node("slow", call)}, "a").score(texts, [{"answer": ""}] * 9)
    assert found.total[[0, *range(2, 9)]].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found.unscored[1] == {"a": "deadline"} and found.total[1].isnan()
    assert user_functions.MOST == 3


def test_an_async_failure_names_its_line_too():
    with pytest.raises(
        FunctionError, match=r"failed on row 1, response 'x': .*user_functions\.py:\d+: ValueError: could"
    ):
        reward_of({"a": node("slow", {})}, "a").score(["1", "x"], ROWS[:2])


def test_a_gate_lets_a_term_count_only_where_another_is_positive():
    shape = {"name": "format", "weight": 0.5, "pattern": "[a-z]+", "match": "whole"}
    reward = reward_of({"shape": shape, "right": EXACT | {"gate": "shape"}}, "right")
    rows = [{"answer": "A"}, {"answer": "a"}, {"answer": "b"}]
    found = reward.score(["A", "a", "a"], rows)
    assert found.terms["right"].tolist() == [1.0, 1.0, 0.0], "the raw value does not depend on the gate"
    assert found.total.tolist() == [0.0, 1.5, 0.5]


def test_a_row_whose_gate_is_unscored_is_unscored():
    gate = node("by_command", {"failed": "drop_row"}) | {"weight": 0.0}
    found = reward_of({"a": gate, "right": EXACT | {"gate": "a"}}, "right").score(["a", "raise"], ROWS[:2])
    assert found.total[0] == 1.0 and found.total[1].isnan()


def test_a_value_is_clipped_before_its_weight():
    reward = reward_of({"a": node("by_command", {}) | {"weight": 2.0, "clip": [1.5, 2.5]}}, "a")
    found = reward.score(["a", "aa", "aaa"], ROWS[:3])
    assert found.total.tolist() == [3.0, 4.0, 5.0] and found.terms["a"].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"failed": "drop"}, r"^reward\.terms\.a\.call\.failed: expected drop_row or drop_group or stop or number"),
        ({"deadline_s": 1.0}, r"^reward\.terms\.a\.call\.deadline_s=1: nothing can stop a function in the process"),
        ({"concurrency": 2}, r"^reward\.terms\.a\.call\.concurrency=2: one call runs at a time"),
        ({"tries": 0}, r"^reward\.terms\.a\.call\.tries=0: it must be at least 1"),
        ({"deadline": 1.0}, r"^reward\.terms\.a\.call\.deadline: .*did you mean deadline_s"),
    ],
)
def test_options_of_a_call_that_cannot_act_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        reward_of({"a": EXACT | {"call": call}}, "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": "b"}, r"^reward\.terms\.a\.gate=b: name another term of reward\.terms"),
        ({"gate": "a"}, r"^reward\.terms\.a\.gate=a: name another term"),
        ({"clip": [1.0, 1.0]}, r"^reward\.terms\.a\.clip=\[1\.0, 1\.0\]: expected \[low, high\] with low < high"),
        ({"clip": 1.0}, r"^reward\.terms\.a\.clip: expected"),
    ],
)
def test_gates_and_limits_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        reward_of({"a": EXACT | changes}, "a")
