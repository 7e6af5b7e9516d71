"""The figures of the code: each on a few lines, and the step on a program of its own."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
FILES = list((ROOT / "rft").rglob("*.py"))
sys.path.insert(0, str(SCRIPTS))

from code_figures import STEP, code_lines, figures, import_cycles, signatures_of  # noqa: E402
from figures.architecture import BASE, draw, measure  # noqa: E402

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


NUMBER = re.compile(r'(?<=class="lines")([^>]*)>([\d,]+)')


def drawn(lines: dict[Path, int]) -> tuple[list[int], list[int], str, str]:
    """The numbers of the committed drawing, those of one with these lines, and both without their numbers."""
    texts = [(ROOT / "docs" / "pictures" / "architecture.svg").read_text(), draw(measure(ROOT, lines))]
    kept, made = ([int(number.replace(",", "")) for _, number in NUMBER.findall(text)] for text in texts)
    return kept, made, NUMBER.sub(r"\1", texts[0]), NUMBER.sub(r"\1", texts[1])


def test_the_committed_drawing_shows_the_rooms_and_parts_that_there_are() -> None:
    kept, made, before, after = drawn(dict.fromkeys(FILES, 1))
    assert len(kept) == len(made) > 30
    assert before == after, "run: python scripts/code_figures.py --checkout . --draw"


@pytest.mark.slow
def test_the_numbers_of_the_committed_drawing_are_at_most_a_tenth_off() -> None:
    kept, made, *_ = drawn({path: code_lines(path.read_text()) for path in FILES})
    assert kept == [pytest.approx(number, rel=0.1, abs=20) for number in made], "draw it again"


def test_a_file_counts_in_its_room_or_in_each_of_its_parts() -> None:
    own = {"waits.py": 2, "rollout/sampler.py": 5, "rollout/environment/gateway/api.py": 7}
    measured = measure(ROOT, dict.fromkeys(FILES, 0) | {ROOT / "rft" / name: number for name, number in own.items()})
    assert (measured.core, measured.of_parts) == (7, 7)
    assert {name: lines for name, lines in measured.rooms.items() if lines} == {"rollout": 5, BASE: 2}
    outer = next(part for part in measured.parts if part.name == "environments")
    assert (outer.lines, {part.name: part.lines for part in outer.inner}["gateway"]) == (7, 7)


def test_the_page_on_the_architecture_names_functions_that_there_are() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"\| \[(rft/\S+\.py)\]\(\.\./(\S+)\) \| `(\w+)` \|", page)
    assert len(rows) > 15
    for path, link, function in rows:
        assert path == link and f"def {function}(" in (ROOT / path).read_text(), (path, function)
