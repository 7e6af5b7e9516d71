"""The reward for programs: which pass their tests, and those that try to be rewarded without passing."""

import pytest

from rft.registry import Target
from rft.reward.sandbox.cases import Call, StdinCase
from rft.reward.sandbox.code import count_right, equal, extract_program, passes
from rft.reward.sandbox.isolation.harness import evaluate, plain
from rft.reward.sandbox.programs import Outcome
from rft.reward.term import Unscored
from tests.reward.reward_of import reward_of
from tests.reward.sandbox.isolated import LIMITS
from tests.reward.sandbox.test_sandbox_attacks import start

SANDBOX = {
    "require": ["namespaces", "network", "landlock", "seccomp"],
    "workers": 2,
    "packages": [],
    "limits": vars(LIMITS),
}
NODE = {
    "_target_": "rft.reward.sandbox.code.CodeTests",
    "field": "tests",
    "program": "whole",
    "score": "all",
    "entry_point": None,
    "asserts": "outside",
    "stdout": "numbers",
    "tolerance": 1e-6,
    "prelude": "",
    "sandbox": SANDBOX,
}


def term(**changes):
    return Target(NODE | changes, "reward.terms.code", ("key",)).build(key="reward.terms.code")


@pytest.fixture(scope="module")
def whole():
    start().close()  # skips where a layer is missing
    return term()


@pytest.fixture(scope="module")
def share():
    return term(score="share")


SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]
ADD = [
    {"function": "add", "args": [1, 2], "expected": 3},
    {"function": "add", "args": [4, 5], "expected": 9},
    {"function": "add", "args": [[1], [2]], "expected": [1, 2]},
    {"function": "add", "args": [0.1, 0.2], "expected": 0.3},
]
READ = "a, b = map(int, input().split())\n"
RUNS = {  # program: the share of SUMS that it passes
    READ + "print(a + b)": 1.0,
    READ + "print(a + b, '  ')\nprint()": 1.0,
    READ + "print(a * b + 1)": 0.5,  # 3 and 21
    READ + "print(); print(a + b)": 0.0,  # an empty line in front
    READ + "print(3)": 0.5,
    READ + "print(a + b)\nraise SystemExit(1)": 0.0,  # prints what is expected and fails
    READ + "print(a + b, flush=True)\nimport os\nos.abort()": 0.0,
    "print('ok')": 0.0,
    "import os\nfor n in range(3, 256):\n    try: os.write(n, b'ok')\n    except OSError: pass": 0.0,
    "import os\nos.write(1, bytes(range(256)))": 0.0,
    "": 0.0,
    "import sys\nsys.exit(0)": 0.0,
}
CALLS = {  # program: the share of ADD that it passes
    "def add(a, b): return a + b": 1.0,
    "class Solution:\n    def add(self, a, b):\n        return a + b": 1.0,
    "def add(a, b):\n    print(a)\n    return a + b": 1.0,  # what it prints is no result
    "def add(a, b): return 3": 0.25,
    "def add(a, b): return (1, 2) if a == [1] else a + b": 1.0,  # a tuple counts as a list
    "def add(a, b): return 3 if a == 1 else exit(0)": 0.25,
    "def add(a, b): raise KeyError": 0.0,
    "def add(a, b): return object()": 0.0,
    "def sub(a, b): return a - b": 0.0,
    "def add(a, b): return float('nan')": 0.0,
    "class Equal(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Equal(0)": 0.0,
    "import json, builtins\njson.dumps = lambda value: '[0, 3]'\ndef add(a, b): return 0": 0.25,
    "import builtins\nbuiltins.isinstance = builtins.eval = lambda *a: True\ndef add(a, b): return object()": 0.0,
    "import os\nfor n in range(256):\n    try: os.write(n, b'[0, true]\\n[1, 1e999]\\n[2, {}]\\n[\"0\"]\\n')\n"
    "    except OSError: pass\nos._exit(0)": 0.0,
    "import os\nfor n in range(3, 256):\n    try: os.write(n, b'[' * 50000)\n"
    "    except OSError: pass\ndef add(a, b): return a + b": 0.75,
    "import sys\nframe = sys._getframe()\nwhile frame: print(frame.f_locals); frame = frame.f_back\n"
    "def add(a, b):\n    names = [str(f) for f in sys._current_frames().values()]\n    return 0": 0.0,
}


@pytest.mark.parametrize("program", RUNS)
def test_programs_that_read_and_print(program, whole, share):
    assert share.values([program], [{"tests": SUMS}]) == [RUNS[program]]
    assert whole.values([program], [{"tests": SUMS}]) == [float(RUNS[program] == 1.0)]


@pytest.mark.parametrize("program", CALLS)
def test_functions_of_programs(program, whole, share):
    assert share.values([program], [{"tests": ADD}]) == [CALLS[program]]
    assert whole.values([program], [{"tests": ADD}]) == [float(CALLS[program] == 1.0)]


def test_a_program_for_another_row_may_pass_a_share_of_its_tests_alone(whole, share):
    assert (whole.others, share.others) == ("zero", "less"), "what the certificate of a grader demands"


def test_the_expected_values_are_not_in_the_sandbox(share):
    """A program that searches its own memory and input for the marks of the calls finds the arguments alone."""
    tests = [{"function": "find", "args": ["mark-of-an-argument"], "expected": "mark-of-the-result"}]
    program = (
        "import gc\ndef find(argument):\n"
        "    seen = [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple)) and len(o) < 1000]\n"
        "    found = [one for one in seen if '-'.join(['mark', 'of']) in one]\n"
        "    assert any('-'.join(['mark', 'of', 'an', 'argument']) in one for one in found)\n"
        "    result = '-'.join(['mark', 'of', 'the', 'result'])\n"
        "    return result if any(result in one for one in found) else 'nothing'"
    )
    assert share.values([program], [{"tests": tests}]) == [0.0]
    known = tests[0] | {"args": ["mark-of-an-argument", "mark-of-the-result"]}
    assert share.values([program.replace("(argument)", "(*arguments)")], [{"tests": [known]}]) == [1.0]


def test_asserts_compare_outside_or_inside(whole):
    inside = term(asserts="inside")
    program = "def half(n): return n / 2"
    rows = [{"tests": "assert half(3) == 1.5\nassert not half(0)"}, {"tests": "assert abs(half(3) - 1.5) < 1e-9"}]
    assert whole.values([program], rows[:1]) == [1.0]
    assert inside.values([program] * 2, rows) == [1.0, 1.0]
    forged = "class All:\n    __sub__ = __rsub__ = lambda self, other: 0\n    def __eq__(self, other): return True\n"
    forged += "def half(n): return All()"
    assert whole.values([program] * 2, rows) == [1.0, 1.0]
    assert whole.values([forged] * 2, rows) == [0.0, 0.0]
    assert inside.values([forged] * 2, rows) == [0.0, 1.0]  # what docs/sandbox.md warns of


def test_a_verl_row_with_the_tests_as_a_text(whole):
    row = {"tests": '{"inputs": [[1, 2]], "outputs": [[3]], "fn_name": "add"}'}
    assert whole.values(["def add(a, b): return a + b"], [row]) == [1.0]


def test_the_prelude_stands_in_front_of_the_program(share):
    program = "def add(a: List[int], b): return a + b"
    assert share.values([program], [{"tests": ADD}]) == [0.0]
    assert term(prelude="from typing import List").values([program], [{"tests": ADD}]) == [1.0]


def test_a_program_beyond_its_time_fails_its_test():
    quick = term(score="share", sandbox=SANDBOX | {"limits": vars(LIMITS) | {"seconds": 1.0}})
    assert quick.values([READ + "print(a + b, flush=True)\nwhile a == 1: pass"], [{"tests": SUMS}]) == [0.5]


def test_many_responses_are_scored_in_their_order(whole):
    programs = [READ + f"print(a + b + {n % 2})" for n in range(6)]
    assert whole.values(programs, [{"tests": SUMS}] * 6) == [1.0, 0.0] * 3


def test_a_sandbox_that_fails_gives_no_score(monkeypatch):
    broken = term()
    monkeypatch.setattr(broken._sandbox, "_layers", ["namespaces"])
    (value,) = broken.values([READ + "print(a + b)"], [{"tests": SUMS}])
    assert isinstance(value, Unscored) and value.reason.startswith(
        "the sandbox failed: reward.terms.code.sandbox.require"
    )


def test_a_response_without_a_program_is_not_run(monkeypatch):
    blocks = term(program="last_block")
    monkeypatch.setattr(blocks._sandbox, "_layers", [])
    assert blocks.values(["I do not know."], [{"tests": SUMS}]) == [0.0]


# (printed, expected, equal as numbers to 1e-6, equal as texts)
PRINTED = [
    ("1.5\n", "1.50", True, False),
    ("0.3333333333", "0.333333\n", True, False),  # 1/3 is 3.3e-7 of 0.333333 away, relatively 1e-6 at most
    ("0.33334", "0.333333", False, False),
    ("1e-9", "0.0", False, False),  # the tolerance is relative
    ("5.0", "5", True, False),
    ("5.000001", "5", False, False),  # a whole number is exact
    ("1000000008", "1000000007", False, False),
    ("1 2.50\n-3", "1.0 2.5\n-3", True, False),
    ("1 2", "1 2 3", False, False),
    ("1\n2", "1", False, False),
    ("2 1", "1 2", False, False),
    ("101", "0101", False, False),  # a text of digits
    ("YES 1.0", "YES 1.00", False, False),  # no line of numbers
    ("  *", "*", False, False),
    ("nan", "1.5", False, False),
    ("1_5", "15", False, False),
    ("9" * 1_048_576, "8" * 1_048_576 + ".5", False, False),
    ("1" + "0" * 5000, "1" + "0" * 5000, True, True),
    ("a  \n\n", "a", True, True),
]


@pytest.mark.parametrize(("printed", "expected", "as_numbers", "as_texts"), PRINTED)
def test_what_is_printed(printed, expected, as_numbers, as_texts):
    case, outcome = StdinCase("", expected), Outcome("ok", printed, "", 0.0, "")
    assert [passes(case, outcome, tolerance) for tolerance in (1e-6, None)] == [as_numbers, as_texts]


def test_the_numbers_that_programs_print(whole):
    tests = [{"tests": [{"input": "", "output": "1.50"}]}] * 2
    assert whole.values(["print(3 / 2)", "print(1.6)"], tests) == [1.0, 0.0]
    assert term(stdout="text").values(["print(3 / 2)", "print('1.50')"], tests) == [0.0, 1.0]


def test_integers_of_any_number_of_digits(whole, share):
    printed = {"tests": [{"input": "", "output": "1" + "0" * 5000}]}
    assert whole.values(["print(10**5000)", "print(10**5001)"], [printed] * 2) == [1.0, 0.0]
    called = {"tests": [{"call": "big(2)", "expected": 100}, {"call": "big(5000)", "expected": 100}]}
    assert share.values(["def big(n): return 10**n"], [called]) == [0.5]
    compared = {"tests": "assert big(5000) == 10**5000"}
    assert whole.values(["def big(n): return 10**n", "def big(n): return 10**n + 1"], [compared] * 2) == [1.0, 0.0]


BLOCKS = {
    "Sure:\n```python\nprint(1)\n```\nDone.": "print(1)\n",
    "```py\na\n```\nbetter:\n```Python3\nb\nc\n```": "b\nc\n",
    "```python\na = '```'\n```": "a = '```'\n",
    "```\na\n```": None,
    "```json\n{}\n```": None,
    "print(1)": None,
    "```python\nprint(1)": None,
}


@pytest.mark.parametrize("response", BLOCKS)
def test_the_last_block_of_python_is_the_program(response):
    assert extract_program(response) == BLOCKS[response]


EQUAL = [
    (1, 1, True),
    (1, 1.0, True),
    (1.0000001, 1.0, True),
    (1.0001, 1.0, False),
    (True, 1, True),
    ("1", 1, False),
    ([1, [2.0]], [1, [2.0000000001]], True),
    ([1, 2], [1], False),
    ({"a": [1.0]}, {"a": [1.0000000001]}, True),
    ({"a": 1}, {"b": 1}, False),
    (None, None, True),
    (10**400, 1.5, False),
    ([], None, False),
]


@pytest.mark.parametrize(("value", "expected", "same"), EQUAL)
def test_equal(value, expected, same):
    assert equal(value, expected, 1e-6) is same


def test_lines_that_the_harness_did_not_write_are_ignored():
    calls = [Call({}, [3]), Call({}, [[4], 4])]
    stdout = 'x\n[0]\n3\n["0", 3]\n[true, 4]\n' + "[" * 100_000 + "\n[0, 3]\n[9, 9]\n[1, 4]\n"
    assert count_right(calls, stdout, 0.0) == 2
    assert count_right(calls, "[0, 3]\n[0, 2]\n", 0.0) == 0  # the last line of a call counts
    assert count_right([Call({}, [10**5000])], f"[0, 1{'0' * 5000}]", 0.0) == 1  # Python reads 4300 digits
    assert count_right([Call({}, [10**5000])], f"[0, 1{'0' * 4999}1]", 0.0) == 0


def test_plain_values():
    assert plain({1: (2, {3.5, 1.0}), "a": None}) == {"1": [2, {"set": [1.0, 3.5]}], "a": None}
    with pytest.raises(TypeError, match="a complex is no value of JSON"):
        plain([1j])
    assert evaluate({"expression": "a + 1"}, {"a": 1}) == 2


def test_rows_are_checked_before_the_run():
    with pytest.raises(ValueError, match="the field 'tests' has no tests, so no program is right"):
        term().check_row({"tests": []})
    term().check_row({"tests": SUMS})
    assert term(field="checks").reads == ("checks",)


def test_the_options_of_the_yaml(resolved):
    node = resolved("reward=code")["reward"]
    reward = reward_of(node["terms"], node["accuracy"])
    assert reward.fields == ("tests",) and not reward.extracts
    with pytest.raises(ValueError, match=r"reward\.terms\.code\.sandbox\.limits\.memory_mib=1: it must be at least 64"):
        limits = node["terms"]["code"]["sandbox"]["limits"] | {"memory_mib": 1}
        reward_of({"code": node["terms"]["code"] | {"sandbox": SANDBOX | {"limits": limits}}}, "code")
