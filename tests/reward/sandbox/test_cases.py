"""Cases of a program in a row: every form, and what is refused."""

import json

import pytest

from rft.reward.sandbox.cases import Call, Cases, Script, StdinCase, read_tests

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
    assert read_tests(value, "tests", "outside") == tests


@pytest.mark.parametrize(("value", "tests"), [form for form in FORMS if not isinstance(form[0], str)])
def test_a_form_may_be_a_text_with_json(value, tests):
    assert read_tests(json.dumps(value), "tests", "outside") == tests


INSIDE = ["assert abs(f(1) - 2) < 0.1", "assert f(1) == f(2)", "assert f(1) in (1, 2)", "assert isclose(f(1), 2.0)"]


@pytest.mark.parametrize("text", INSIDE)
def test_an_assert_without_a_literal_runs_apart_or_inside(text):
    names = ("f", "isclose") if "isclose" in text else ("f",)
    assert read_tests(text, "tests", "outside") == Cases(script=Script("", (text,), names))
    (call,) = read_tests(text, "tests", "inside").calls
    assert call == Call({"expression": f"bool({text.removeprefix('assert ')})"}, [True])


CHECK = """
METADATA = {"author": "x"}

def check(candidate):
    'Tests.'
    assert candidate([1, 2]) == 3, "sum"
    assert True, "prints this"
    assert not candidate([])
"""
LOOP = "import random\ndef check(c):\n    for n in range(3):\n        assert c([n]) == n, random"
LOOPS = "import random\n\ndef check(c):\n    for n in range(3):\n        assert c([n]) == n, random"
DOUBLE = "def double(n):\n    return n * 2"
HUMANEVAL = [  # with the entry point total
    (
        CHECK,
        Cases(calls=(Call({"expression": "total([1, 2])"}, [3]), Call({"expression": "bool(total([]))"}, [False]))),
    ),
    (LOOP, Cases(script=Script(LOOPS.replace("\n\n", "\n"), ("check(total)",), ("total",)))),
    (f"{LOOP}\ncheck(add)", Cases(script=Script(LOOPS.replace("\n\n", "\n"), ("check(add)",), ("add", "total")))),
    ("def check(c):\n    assert c(1) == c(2)", Cases(script=Script("", ("assert total(1) == total(2)",), ("total",)))),
    (
        f"{DOUBLE}\nassert total(double(1)) == 2\nassert total(3) == 3",
        Cases(script=Script(DOUBLE, ("assert total(double(1)) == 2", "assert total(3) == 3"), ("total",))),
    ),
    ("x = [1]\nassert total(x) == x[0]", Cases(script=Script("", ("x = [1]\nassert total(x) == x[0]",), ("total",)))),
    ("x = 1\nassert total(1) == 1", Cases(calls=(Call({"expression": "total(1)"}, [1]),))),
    (
        [{"input": "[1]\n2", "output": "3", "testtype": "functional"}],
        Cases(calls=(Call({"function": "total", "args": [[1], 2]}, [3]),)),
    ),
    ([{"input": "1", "output": "3", "testtype": "stdin"}], Cases(runs=(StdinCase("1", "3"),))),
    ({"input": ["1"], "output": ["3"]}, Cases(runs=(StdinCase("1", "3"),))),
]


@pytest.mark.parametrize(("value", "tests"), HUMANEVAL)
def test_forms_with_an_entry_point(value, tests):
    assert read_tests(value, "tests", "outside", "total") == tests


REFUSED = {
    "no tests": [[], "", {"inputs": [], "outputs": []}],
    "can be read": [
        None,
        3,
        '"text"',
        "assert f(",
        "hello",
        "x = f(1)",
        "assert abs(1) < 2",
        "def check(candidate):\n    assert candidate(1) == 1",
        [{"input": "1", "output": "1", "testtype": "functional"}],
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
        read_tests(value, "checks", "outside")
