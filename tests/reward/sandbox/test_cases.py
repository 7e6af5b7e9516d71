"""Cases of a program in a row: every form, and what is refused."""

import json

import pytest

from rft.reward.sandbox.cases import Call, Cases, StdinCase, read_tests

PAIR = (StdinCase("1 2", "3"), StdinCase("4 5", "9"))


def add(*args, accepted):
    return Call({"function": "add", "args": list(args)}, accepted)


FORMS = [
    ([{"input": "1 2", "output": "3"}, {"input": "4 5", "output": "9"}], Cases(runs=PAIR)),
    ({"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]}, Cases(runs=PAIR)),
    ({"inputs": ["1 2", "4 5"], "outputs": ["3", "9"], "fn_name": None}, Cases(runs=PAIR)),
    ({"inputs": [["1", "2"]], "outputs": [["3"]]}, Cases(runs=(StdinCase("1\n2", "3"),))),
    ([{"function": "add", "args": [1, 2], "expected": 3}], Cases(calls=(add(1, 2, accepted=[3]),))),
    ([{"call": "add(1,2)", "expected": (3,)}], Cases(calls=(Call({"expression": "add(1, 2)"}, [[3]]),))),
    ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}, Cases(calls=(add(1, 2, accepted=[3]),))),
    ({"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}, Cases(calls=(add(1, 2, accepted=[[3], 3]),))),
    ({"inputs": ["1\n[2]"], "outputs": ["3"], "fn_name": "add"}, Cases(calls=(add(1, [2], accepted=[3]),))),
    (
        "import math\nassert f(1) == {2}",
        Cases(calls=(Call({"expression": "f(1)"}, [{"set": [2]}]),), setup="import math"),
    ),
    (["assert [-1] == f('a')"], Cases(calls=(Call({"expression": "f('a')"}, [[-1]]),))),
    (["assert sorted(f(1)) == [1]"], Cases(calls=(Call({"expression": "sorted(f(1))"}, [[1]]),))),
    (["assert f(1)"], Cases(calls=(Call({"expression": "bool(f(1))"}, [True]),))),
    (["assert not f(x=1)"], Cases(calls=(Call({"expression": "bool(f(x=1))"}, [False]),))),
]


@pytest.mark.parametrize(("value", "tests"), FORMS)
def test_forms(value, tests):
    assert read_tests(value, "tests", "compared") == tests


@pytest.mark.parametrize(("value", "tests"), [form for form in FORMS if not isinstance(form[0], str)])
def test_a_form_may_be_a_text_with_json(value, tests):
    assert read_tests(json.dumps(value), "tests", "compared") == tests


INSIDE = ["assert abs(f(1) - 2) < 0.1", "assert f(1) == g(1)", "assert f(1) in (1, 2)", "assert isclose(f(1), 2.0)"]


@pytest.mark.parametrize("text", INSIDE)
def test_an_assert_without_a_literal_is_taken_only_on_request(text):
    with pytest.raises(ValueError, match=r"compares with what is no literal.*asserts: inside"):
        read_tests(text, "tests", "compared")
    (call,) = read_tests(text, "tests", "inside").calls
    assert call == Call({"expression": f"bool({text.removeprefix('assert ')})"}, [True])


REFUSED = {
    "no tests": [[], "", {"inputs": [], "outputs": []}],
    "can be read": [
        None,
        3,
        '"text"',
        "assert f(",
        "x = 1\nassert f(1) == 1",
        [{"input": "1"}],
        [{"input": 1, "output": "1"}],
        [{"input": "1", "output": "1"}, {"call": "f(1)", "expected": 1}],
        [{"call": "f(", "expected": 1}],
        [{"function": "f", "args": 3, "expected": 1}],
        [{"function": "f()", "args": [], "expected": 1}],
        [{"function": "f", "args": [], "expected": object()}],
        {"inputs": ["1"], "outputs": []},
        {"inputs": ["1"]},
        {"inputs": [["1"]], "outputs": ["1"], "fn_name": "a b"},
        [1, 2],
    ],
}


@pytest.mark.parametrize(("message", "value"), [(message, value) for message in REFUSED for value in REFUSED[message]])
def test_what_is_no_test_is_refused(message, value):
    with pytest.raises(
        ValueError, match=f"the field 'checks' has no tests.*{message if message == 'can be read' else ''}"
    ):
        read_tests(value, "checks", "compared")
