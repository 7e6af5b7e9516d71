"""Leaves slow tests out of `.ci/run`: those of parts that no change since the last full pass concerns.

python .ci/parts.py          # prints an option of pytest for each of these files
python .ci/parts.py --all    # prints nothing

A part is what tests/architecture/parts.py lists. A change of the part itself, of one that it needs, of the core, of a
yaml, of what tests share or of a version concerns it; a change of another part, of a page or of another test file does
not. How many files are left out is printed to stderr.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from suites import FULL_PASS, changed_files, changed_packages, full_pass  # noqa: E402

from tests.architecture.parts import NEEDS, files_of_parts  # noqa: E402
from tests.architecture.rules import mirrored  # noqa: E402

OTHER = ("docs/", "recipes/", "scripts/")  # what the slow tests of no part read


def main() -> None:
    """Prints an option of pytest for each test file that is left out."""
    parser = argparse.ArgumentParser(description="Prints the test files that the slow tests leave out.")
    parser.add_argument("--all", action="store_true", help="leaves out none")
    commit = None if parser.parse_args().all else full_pass(ROOT)
    left_out: list[str] = []
    tested = parts_of_tests(ROOT)
    if commit is not None and not changed_packages(ROOT, commit):
        left_out = unchanged(ROOT, tested, changed_files(ROOT, commit))
    sys.stderr.write(f"left out: {len(left_out)} of the {len(tested)} test files of parts\n")
    sys.stdout.write("".join(f"--ignore={path}\n" for path in left_out))


def unchanged(root: Path, tested: dict[str, set[str]], changed: Iterable[str]) -> list[str]:
    """The test files that no changed file concerns.

    Args:
        root: of the clone.
        tested: the parts that each test file needs.
        changed: the paths of the changed files.
    """
    files = files_of_parts(root)
    left_out = dict(tested)
    for path in changed:
        if path == FULL_PASS or path.endswith(".md") or path.startswith(OTHER):
            continue
        if path.startswith("tests/") and Path(path).name.startswith("test_"):
            left_out.pop(path, None)
            continue
        of = {part for part, its in files.items() if root / path in its}
        left_out = {test: parts for test, parts in left_out.items() if of and not of & parts}
    return sorted(left_out)


def with_needs(part: str) -> set[str]:
    """A part, and the parts that it needs, which need others."""
    return {part}.union(*map(with_needs, NEEDS.get(part, ())))


def parts_of_tests(root: Path) -> dict[str, set[str]]:
    """The parts that a test file tests and those that they need, of every file that tests nothing else."""
    files = files_of_parts(root)
    tested = {}
    for path in (root / "tests").rglob("test_*.py"):
        found = mirrored(root, path)
        subjects = {file for place in found for file in ([place] if place.is_file() else place.rglob("*.py"))}
        of = {part for part, its in files.items() if its & subjects}
        if subjects and subjects <= set().union(*(files[part] for part in of)):
            tested[str(path.relative_to(root))] = set().union(*map(with_needs, of))
    return tested


if __name__ == "__main__":
    main()
