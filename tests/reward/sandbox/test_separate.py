"""Tests that run apart from the program: HumanEval and MBPP, and programs that try to pass without being right."""

import builtins
import os

import pytest

from rft.reward.sandbox.cases import Script
from rft.reward.sandbox.isolation.separate import MARK, ProgramError, decode, encode, error_of
from rft.reward.sandbox.separate import count_passed
from rft.reward.term import Unscored
from tests.reward.sandbox.attacks import writes
from tests.reward.sandbox.isolated import none_left
from tests.reward.sandbox.test_code import SANDBOX, term
from tests.reward.sandbox.test_sandbox_attacks import start

CHECK = """
from collections import Counter
import random

METADATA = {"author": "x", "dataset": "test"}

def check(candidate):
    for n in range(5):
        numbers = [random.randrange(100) for _ in range(n)]
        assert candidate(numbers) == sorted(numbers), "a message"
    assert abs(sum(candidate([0.1, 0.2])) - 0.3) < 1e-9
    assert Counter(candidate([2, 1, 1])) == Counter([1, 1, 2])
"""
ROW = {"tests": CHECK, "entry_point": "order"}
RIGHT = "def order(numbers): return sorted(numbers)"


@pytest.fixture(scope="module")
def sandbox():
    found = start()
    yield found
    assert none_left(found._server.pid)
    found.close()


@pytest.fixture(scope="module")
def code(sandbox):
    return term(entry_point="entry_point")


def passed(code, program, row=ROW):
    (value,) = code.values([program], [row])
    return value


def test_tests_run_for_a_process_with_many_open_files(code):
    """`select` takes descriptors up to 1023 alone."""
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert passed(code, RIGHT) == 1.0
    finally:
        for descriptor in opened:
            os.close(descriptor)


ALL = "class All(list):\n    __eq__ = __lt__ = __contains__ = lambda *a: True\n    __hash__ = object.__hash__\n"
NOTHING = "def order(numbers): return []"
ZERO = "def order(numbers): return 0"
PATCH = """
import sys
for module in list(sys.modules.values()):
    try: module.check = module.run_tests = lambda *a: None
    except Exception: pass
"""
STACK = """
import sys
def order(numbers):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if getattr(value, '__name__', '') == 'check': return value
        frame = frame.f_back
"""
FORK = """
import os
if os.fork() == 0:
    while True:
        try: os.write(3, b'["value", []]\\n')
        except OSError: pass
"""
ATTACKS = {
    "equal to everything": f"{ALL}def order(numbers): return All()",
    "equal to everything, in a list": f"{ALL}def order(numbers): return [All()]",
    "patches the check": PATCH + NOTHING,
    "overrides AssertionError": f"import builtins\nbuiltins.AssertionError = type('X', (BaseException,), {{}})\n{ZERO}",
    "overrides sorted and sum": f"import builtins\nbuiltins.sorted = builtins.sum = lambda *a, **k: 0\n{ZERO}",
    "exits": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef order(numbers): os._exit(0)",
    "raises SystemExit": "import sys\ndef order(numbers): sys.exit(0)",
    "raises an error that a test could expect": "def order(numbers): raise StopIteration",
    "ends all iterations": "def order(numbers): raise StopAsyncIteration",
    "exits at its end": f"import atexit, os\natexit.register(os._exit, 0)\n{NOTHING}",
    "redefines map, all and abs": f"import builtins as b\nb.map = b.all = b.abs = lambda *a: 0\n{NOTHING}",
    "patches unittest": f"import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n{NOTHING}",
    "a generator": "def order(numbers): yield from sorted(numbers)",
    "a thread that exits": f"import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()\n{NOTHING}",
    "prints a verdict": f"print('0')\n{NOTHING}\nprint('[\"value\", []]', 0, flush=True)",
    "calls the mark of a check": f"import builtins, sys\nbuiltins.{MARK} = lambda: 0\n{NOTHING}",
    "writes a verdict": writes("b'0\\n1\\n' * 20", 0) + NOTHING,
    "writes values ahead": writes("b'[\"value\", []]\\n' * 20", 0) + NOTHING,
    "writes what is no value": writes('b\'["value", {"tuple": 3}]\\n\'') + NOTHING,
    "writes a line without an end": "while True:\n    "
    + writes("b'x' * 65536").replace("\n", "\n    ")
    + f"\n{NOTHING}",
    "patches random": f"import random\nrandom.randrange = lambda n: 0\n{NOTHING}",
    "reads the stack": STACK,
    "mutates its argument": "def order(numbers):\n    numbers.clear()\n    return []",
    "deep": "def order(numbers):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "a huge value": "def order(numbers): return 'x' * (1 << 25)",
    "traces": f"import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n{NOTHING}",
    "an endless loop": "def order(numbers):\n    while True: pass",
    "a fork that answers": FORK + NOTHING,
    "no such function": "def other(numbers): return sorted(numbers)",
    "no Python": "def",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "an endless loop" else []) for name in ATTACKS],
)
def test_a_program_that_is_wrong_does_not_pass(name, code):
    assert passed(code, ATTACKS[name]) == 0.0
    assert none_left(code._sandbox._server.pid)


RIGHTS = [
    RIGHT,
    "class Solution:\n    def order(self, numbers):\n        print('x')\n        return sorted(numbers)",
    "import sys\ndef order(numbers):\n    sys.stdin.read()\n    return sorted(numbers)",
]


@pytest.mark.parametrize("program", RIGHTS)
def test_a_program_that_is_right_passes(program, code):
    assert passed(code, program) == 1.0


def test_each_assert_statement_is_a_test(sandbox):
    share = term(score="share")
    tests = (
        "assert half(3) == 1.5\nassert half(half(8)) <= 2\nassert half(2) is not None\nassert type(half((1,))) is tuple"
    )
    assert passed(share, "def half(n): return n / 2", {"tests": tests}) == 0.75
    assert passed(share, "def half(n): return n if isinstance(n, tuple) else n / 2", {"tests": tests}) == 1.0


def test_a_test_may_expect_an_error(code):
    tests = "def check(c):\n    try:\n        c('a')\n    except ValueError:\n        return\n    assert False"
    row = {"tests": tests, "entry_point": "number"}
    assert passed(code, "def number(text): return int(text)", row) == 1.0
    assert passed(code, "def number(text): raise KeyError", row) == 0.0
    assert passed(code, "class ValueError(Exception): pass\ndef number(text): return 1", row) == 0.0


def test_check_with_literals_is_compared_and_needs_no_second_process(code, monkeypatch):
    monkeypatch.setattr("rft.reward.sandbox.code.count_passed", None)
    row = {"tests": "def check(candidate):\n    assert candidate(2) == 1.0", "entry_point": "half"}
    assert passed(code, "def half(n): return n / 2", row) == 1.0
    assert code.reads == ("tests", "entry_point")


BROKEN = {
    "import no_such_package\ndef check(c):\n    assert c(1) < 2": "the tests cannot run: ModuleNotFoundError",
    "def check(c):\n    assert c(lambda n: n) < 2": "the tests cannot run: a function is no plain data",
}


@pytest.mark.parametrize("tests", BROKEN)
def test_tests_that_cannot_run_give_no_score(tests, code):
    value = passed(code, RIGHT, {"tests": tests, "entry_point": "order"})
    assert isinstance(value, Unscored) and value.reason.startswith(BROKEN[tests])


def test_a_sandbox_that_fails_gives_no_score(monkeypatch):
    broken = term(entry_point="entry_point")
    monkeypatch.setattr(broken._sandbox, "_layers", ["namespaces"])
    value = passed(broken, RIGHT)
    assert isinstance(value, Unscored) and value.reason.startswith("the sandbox failed: ")


def test_the_program_does_not_see_the_tests(sandbox):
    program = "import gc\ndef find():\n    mark = '-'.join(['a', 'mark'])\n"
    program += "    return any(mark in repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple)))"
    assert count_passed(sandbox, program, Script("mark = 'a-mark'", ("assert not find(), 'a-mark'",), ("find",))) == 1


LOOPS = {
    "map": "def check(c):\n    for value in map(c, [[2, 1], [1]]):\n        assert value in ([1, 2], [1])",
    "iter": "def check(c):\n    for value in iter(lambda: c([2, 1]), [1, 2]):\n        assert False",
    "all": "def check(c):\n    assert all(map(lambda x: c(x) == sorted(x), [[2, 1], [1]]))",
    "zip": "def check(c):\n    for value, right in zip(c([2, 1]), [1, 2]):\n        assert value == right",
    "swallowed": "def check(c):\n    for x in [[2, 1], [1]]:\n        try:\n            value = c(x)\n"
    "        except Exception:\n            continue\n        assert value == sorted(x)",
    "thread": "import threading\ndef check(c):\n    found = []\n    def run():\n        found.append(c([2, 1]))\n"
    "    t = threading.Thread(target=run)\n    t.start()\n    t.join()\n"
    "    for x in found:\n        assert x == [1, 2]",
    "generator": "def check(c):\n    def each():\n        for x in [[2, 1], [1]]:\n            yield c(x), sorted(x)\n"
    "    for value, right in each():\n        assert value == right",
}
ENDS = ["StopIteration", "StopAsyncIteration", "GeneratorExit", "SystemExit", "KeyboardInterrupt", "BaseException"]


@pytest.mark.parametrize("loop", LOOPS)
def test_tests_whose_checks_do_not_run_are_not_passed(loop, code):
    row = {"tests": LOOPS[loop], "entry_point": "order"}
    assert passed(code, RIGHT, row) == 1.0
    for program in [*(f"def order(x): raise {kind}" for kind in ENDS), NOTHING]:
        assert passed(code, program, row) == 0.0, program


HONEST = [
    "def check(c):\n    for x in [[2, 1]]:\n        assert c(x) == [1, 2]",
    "def check(c):\n    try:\n        c(3)\n        assert c([1]) == [2]\n    except TypeError:\n        pass",
    "def check(c):\n    try:\n        c(3)\n    except Exception:\n        return\n    assert False, 'no error'",
    "from contextlib import suppress\ndef check(c):\n    if c([2, 1]) != [1, 2]:\n        raise AssertionError\n"
    "    with suppress(TypeError):\n        assert c(3) == 4",
    "import unittest\nclass T(unittest.TestCase):\n"
    "    def test(self):\n        self.assertEqual(order([2, 1]), [1, 2])\n"
    "    def test_error(self):\n        with self.assertRaises(TypeError):\n            order(3)\n"
    "result = unittest.defaultTestLoader.loadTestsFromTestCase(T).run(unittest.TestResult())\n"
    "assert result.wasSuccessful()",
    "def test_pair():\n    assert order([2, 1]) == [1, 2]\ndef test_empty():\n    assert not order([])\n"
    "test_pair()\ntest_empty()",
    "def leave():\n    raise SystemExit(0)\ntry:\n    leave()\nexcept SystemExit:\n    assert order([2, 1]) == [1, 2]",
    "assert (order([2, 1]) == [1, 2]) == True",
]


@pytest.mark.parametrize("tests", HONEST)
def test_styles_of_tests_pass_a_right_program_and_no_other(tests, code):
    row = {"tests": tests, "entry_point": "order"}
    assert passed(code, RIGHT, row) == 1.0
    for name in ("equal to everything", "raises an error that a test could expect"):
        assert "except Exception" in tests or passed(code, ATTACKS[name], row) == 0.0, name


def test_a_program_that_fails_in_the_setup_of_the_tests_fails(code):
    row = {"tests": "class T:\n    first = order([2, 1])\nassert T.first == [1, 2]", "entry_point": "order"}
    assert passed(code, RIGHT, row) == 1.0 and passed(code, "def order(x): raise KeyError", row) == 0.0


def test_an_error_keeps_its_type_unless_it_steers_its_caller():
    for name in ("ValueError", "UnicodeDecodeError", "OSError", "AssertionError"):
        error = error_of(name)
        assert type(error) is getattr(builtins, name) and isinstance(str(error), str)
    for name in (*ENDS, "ExceptionGroup", "print", "Own", 3, None, ["ValueError"]):
        assert type(error_of(name)) is ProgramError


VALUES = [None, True, -0.0, 10**30, "é\ud800", b"\xff", (1, [2]), {1: {2.5}, (1,): frozenset()}, 1j, [[]]]


def test_values_keep_their_types():
    assert repr(decode(encode(VALUES))) == repr(VALUES)
    with pytest.raises(TypeError, match="a object is no plain data"):
        encode([object()])


@pytest.mark.slow
def test_time_of_both_processes_is_limited():
    quick = term(entry_point="entry_point", sandbox=SANDBOX | {"limits": SANDBOX["limits"] | {"seconds": 1.0}})
    tests = "def check(c):\n    while c(1): pass\n    assert True"
    assert passed(quick, "def f(n): return 1", {"tests": tests, "entry_point": "f"}) == 0.0
