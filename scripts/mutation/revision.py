"""Which functions to change where not all of them can be: what is new, and a part of the rest."""

import ast
import subprocess
from functools import cache
from pathlib import Path
from types import FunctionType

from mutation.operators import definition

PARTS = 7


def changed_and_seventh(revision: str, functions: dict[str, FunctionType]) -> dict[str, FunctionType]:
    """The functions whose text differs from that of a revision, and a seventh of all, another one at each commit.

    All of them where git does not know the revision.
    """
    folder = next(_file(function).parent for function in functions.values())
    if _git(folder, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}") is None:
        return functions
    commits = int(_git(folder, "rev-list", "--count", "HEAD") or 0)
    seventh = sorted(functions)[commits % PARTS :: PARTS]
    return {name: f for name, f in functions.items() if name in seventh or _changed(f, revision)}


def _changed(function: FunctionType, revision: str) -> bool:
    file = _file(function)
    before = definition(_git(file.parent, "show", f"{revision}:./{file.name}") or "", function.__qualname__)
    return before is None or ast.dump(before) != ast.dump(definition(file.read_text(), function.__qualname__))


def _file(function: FunctionType) -> Path:
    return Path(function.__code__.co_filename)


@cache
def _git(folder: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None
