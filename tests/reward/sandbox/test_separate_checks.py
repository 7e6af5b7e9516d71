"""Which statements of tests are checks."""

import pytest

from rft.reward.sandbox.cases import Script
from rft.reward.sandbox.isolation.separate import MARK
from rft.reward.sandbox.separate import mark_checks

STATEMENTS = {  # and whether a mark stands in it
    "assert f(1) == 2": True,
    "for x in f(1):\n    assert x": True,
    "assert False, 'no error'": False,
    "if f(1) != 2:\n    raise ValueError": True,
    "if f(1) != 2:\n    pass": False,
    "np.testing.assert_allclose(f(1), 2)": True,
    "with pytest.raises(ValueError):\n    f(1)": True,
    "with suppress(ValueError):\n    f(1)": False,
    "try:\n    f(1)\nexcept (ValueError, KeyError):\n    pass": True,
    "try:\n    f(1)\nexcept (ValueError, Exception):\n    pass": False,
    "try:\n    f(1)\nexcept:\n    pass": False,
    "f(1)": False,
}


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_mark_stands_where_a_check_begins(statement):
    setup, (test,), has_assert = mark_checks(Script("import x", (statement,), ("f",)))
    assert setup == "import x"
    assert test.count(f"{MARK}()") == STATEMENTS[statement]
    assert has_assert == (STATEMENTS[statement] and "assert " in statement)
    assert "".join(line for line in test.splitlines(True) if MARK not in line).strip() == statement


def test_a_mark_stands_in_front_of_each_check_of_a_function():
    text = "def check(c):\n    'about'\n    if c(1):\n        assert c(2)\n    elif c(3):\n        raise ValueError\n"
    setup, _, has_assert = mark_checks(Script(text, ("check(f)",), ("f",)))
    calls = []
    names = {MARK: lambda: calls.append("mark"), "f": lambda n: calls.append(n) or n}
    exec(f"{setup}\ncheck(f)", names)
    assert calls == [1, "mark", 2]
    assert has_assert and setup.count(MARK) == 2
