"""The Python interpreter as a tool, in the real sandbox."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rft.reward.sandbox.interpreter import Python
from rft.rollout.environment.contract import environment_class
from tests.reward.sandbox.isolated import LIMITS, options
from tests.reward.sandbox.test_sandbox_attacks import start


@pytest.fixture(scope="module", autouse=True)
def isolated():
    """Skips the tests where the machine cannot isolate programs."""
    start().close()


def python(prelude="", **limits):
    return Python(prelude=prelude, sandbox=options(limits=replace(LIMITS, **limits)))


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(37 * 48)", "1776"),
        ("1 + 1", ""),
        ("print('a')\nprint('b')", "a\nb"),
        ("import os\nos.kill(os.getpid(), 9)", "the program was ended by SIGKILL"),
        ("print('x' * 100_000_000)", "the program printed too much"),
        ("a = 'x' * 10**9", "MemoryError|the program used too much memory"),
        ("import os\nos.write(1, bytes([255]))", "\ufffd"),
        ("print(open('/etc/passwd').read())", "Permission denied|No such file"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "Error"),
    ],
)
def test_what_the_policy_reads_of_a_program(code, shown):
    found = python(output_kib=1).code_interpreter(code)
    assert any(part in found for part in shown.split("|")), found
    assert len(found) < 3000


def test_the_policy_reads_that_a_program_does_not_end():
    found = python(seconds=0.5).code_interpreter("while True: pass")
    assert found == "the program ran longer than 0.5 seconds, or than its limit of processor time"


def test_an_error_is_shown_behind_what_was_printed():
    found = python().code_interpreter("print('before')\n1 / 0")
    assert found.startswith("before\nTraceback") and found.endswith("ZeroDivisionError: division by zero")


def test_each_call_is_a_program_of_its_own_with_the_prelude():
    made = python(prelude="import math")
    assert made.code_interpreter("x = math.floor(2.5)\nprint(x)") == "2"
    assert "NameError" in made.code_interpreter("print(x)")


def test_interpreters_share_a_sandbox_and_its_workers():
    made = [python() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: made[number].code_interpreter(f"print({number})"), range(8)))
    assert found == [str(number) for number in range(8)]


def test_it_is_an_environment_with_one_tool(resolved):
    [node] = resolved("environment=python")["environment"]["classes"].values()
    made = environment_class(node, "environment.classes.python")
    assert [*made.tools] == ["code_interpreter"] and not made.scores
    assert made.target.build().code_interpreter("print(2)") == "2"
