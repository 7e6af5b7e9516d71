"""Programs that know what is expected, run outside the sandbox."""

import io
import json
import sys

import pytest

from rft.reward.sandbox.cases import gold_program, read_tests
from rft.reward.sandbox.isolation.harness import evaluate, plain

FUNCTIONS = [
    [{"function": "add", "args": [1, 2], "expected": 3}, {"function": "add", "args": [[1], [2]], "expected": [1, 2]}],
    {"fn_name": "last", "inputs": [[[1, 2]], [[3]]], "outputs": [2, 3]},
    "import math\nassert area(1, unit='m') == 3.5\nassert area((1, 2)) == (3, {4, 5})\nassert not empty('a')",
    [{"call": "f({1: 'x'})", "expected": float("inf")}],
]


@pytest.mark.parametrize("tests", FUNCTIONS)
def test_a_program_returns_the_expected_values(tests):
    cases = read_tests(tests, "tests", "compared")
    names = {}
    exec(gold_program(cases), names)
    for call in cases.calls:
        assert json.dumps(plain(evaluate(call.request, names))) == json.dumps(call.accepted[0])


def test_a_program_prints_the_expected_output(monkeypatch, capsys):
    cases = read_tests([{"input": "1 2\n", "output": "3\n'\"```"}, {"input": "", "output": "{}"}], "tests", "compared")
    for case in cases.runs:
        monkeypatch.setattr(sys, "stdin", io.StringIO(case.input))
        exec(gold_program(cases), {})
        assert capsys.readouterr().out.rstrip() == case.output.rstrip()


@pytest.mark.parametrize("test", ["assert f(1)[0] == 2", "assert len(f(1)) == 2"])
def test_other_expressions_have_no_program(test):
    assert gold_program(read_tests(test, "tests", "compared")) is None
