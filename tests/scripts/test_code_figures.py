"""The figures of the code: each on a few lines, and the step on a program of its own."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from code_figures import STEP, code_lines, figures, import_cycles, signatures_of  # noqa: E402

TEXT = '''
"""A module."""

# a comment
VALUE = """two
lines"""  # code


class Thing:
    """A class

    of four lines.
    """

    def work(self, one: int, /, two: int = 2, *rest: int, three: int, **more: int) -> int:
        """Does it."""

        def inner(four: int) -> int:
            return four

        return inner(one)  # and a comment
'''
PROGRAM = """
from rft.other import Base, helper


class RowSource(Base):
    def next(self, number: int) -> list[int]:
        super().next(number)
        return [each for each in range(number)]


def main() -> None:
    source = RowSource()
    for number in range(4):
        source.next(number)
        helper(number)


main()
"""
OTHER = """
class BaseSource:
    def next(self, number: int) -> None:
        late(number)


Base = BaseSource


def late(number: int) -> None:
    pass


def helper(number: int) -> None:
    if number == 3:
        never(number)


def never(number: int) -> None:
    pass
"""


def test_lines_of_code():
    assert code_lines(TEXT) == 7


def test_parameters():
    found = {each.name: (each.parameters, each.place) for each in signatures_of(TEXT, "a.py")}
    assert found == {
        "Thing.work": (("one", "two", "three", "rest", "more"), "a.py:15"),
        "Thing.work.inner": (("four",), "a.py:18"),
    }


def test_cycles_are_found_through_late_imports_and_types():
    texts = {
        "rft/__init__.py": "",
        "rft/a.py": "from rft.b import thing",
        "rft/b.py": "def f():\n    from rft import c",
        "rft/c.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .a import other",
        "rft/d.py": "import rft.a",
        "rft/sub/__init__.py": "from .e import thing",
        "rft/sub/e.py": "from . import thing",
    }
    assert import_cycles(texts) == [["rft.a", "rft.b", "rft.c"], ["rft.sub", "rft.sub.e"]]
    assert import_cycles(texts | {"rft/c.py": ""}) == [["rft.sub", "rft.sub.e"]]


@pytest.fixture
def checkout(tmp_path):
    """A package whose program has four steps."""
    (tmp_path / "rft").mkdir()
    for name, text in (("__init__", ""), ("main", PROGRAM), ("other", OTHER)):
        (tmp_path / "rft" / f"{name}.py").write_text(textwrap.dedent(text))
    return tmp_path


def test_a_step_is_what_is_entered_between_two_calls_of_next(checkout):
    """`next` of the class above belongs to the step that has begun, and what another step enters does not count."""
    command = [sys.executable, str(STEP), str(checkout), str(checkout / "out.json")]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(checkout)}, check=True, cwd=checkout)
    entered = json.loads((checkout / "out.json").read_text())
    assert [name.split(" ")[1] for name in entered if name.startswith("rft/main.py")] == [
        "RowSource.next",
        "RowSource.next.<locals>.<listcomp>",
    ]
    assert [name.split(" ")[1] for name in entered if name.startswith("rft/other.py")] == [
        "BaseSource.next",
        "late",
        "helper",
    ]
    said = "\n".join(figures(checkout, sorted(checkout.rglob("*.py")), entered))
    assert "one GRPO step enters: 2 files, 4 functions (5 with comprehensions and lambdas)" in said
    assert "python files: 3" in said and "import cycles (sets of modules that import each other): 0" in said
