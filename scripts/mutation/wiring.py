"""A sample of changes in the packages that connect the math, and the record of those that a test notices."""

import ast
import hashlib
import importlib
import inspect
import json
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import FunctionType
from typing import Any

from mutation.operators import WIRING, Change, changes_of
from rft import errors

PACKAGES = ("train", "setup", "rollout", "data", "reward")
COUNT = 30  # changes of each package
# What runs in processes of its own, or needs a package that plain tests do not have.
ELSEWHERE = (
    "data/rows/packages/",
    "reward/sandbox/isolation/",
    "reward/sandbox/workers/",
    "reward/services/",
    "reward/workers",
    "rollout/engine/vllm",
    "rollout/environment/adapters/",
    "rollout/environment/hosted",
    "rollout/server/remote/",
    "rollout/server/sglang",
    "rollout/server/vllm",
)
ROOT = Path(__file__).resolve().parents[2] / "rft"
RECORD = Path(__file__).with_name("wiring.json")  # of each change the test that notices it, or null


def functions() -> dict[str, FunctionType]:
    """The functions and methods of the packages, by `module.name`, without those inside others."""
    found = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        file = path.relative_to(ROOT).with_suffix("").as_posix()
        if not file.startswith(ELSEWHERE) and path.name != "__init__.py":
            place = file.replace("/", ".")
            module = importlib.import_module(f"rft.{place}")
            for name in _names(ast.parse(path.read_text())):
                function = _function(module, name)
                if function is not None:
                    found[f"{place}.{name}"] = function
    return found


def sample(functions: dict[str, FunctionType]) -> list[tuple[str, Change]]:
    """`COUNT` changes of each package, each of another function: those that come first in the order of their hashes.

    So what changes in one function leaves the changes of the others as they are.
    """
    found = []
    for package in PACKAGES:
        names = sorted((name for name in functions if name.startswith(f"{package}.")), key=_hash)
        possible = ((name, change) for name in names for change in _first(name, functions[name]))
        found += list(islice(possible, COUNT))
    return found


def recorded(functions: dict[str, FunctionType], record: dict[str, str | None]) -> list[tuple[str, Change]]:
    """The changes that a test has noticed, as far as the functions still have the line."""
    found = []
    for name in sorted({line.partition(": ")[0] for line, test in record.items() if test} & set(functions)):
        known = {key(name, change): change for change in changes_of(functions[name], WIRING)}
        found += [(name, change) for line, change in known.items() if record.get(line)]
    return found


def gone(record: dict[str, str | None], changes: list[tuple[str, Change]]) -> list[str]:
    """The lines of the record whose change a test has noticed, and which is none of `changes`."""
    there = {key(*change) for change in changes}
    return [line for line, test in record.items() if test and line not in there]


def key(name: str, change: Change) -> str:
    """The line of the record."""
    return f"{name}: {change.removed} -> {change.added}"


def read() -> dict[str, str | None]:
    """The record."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def write(record: dict[str, str | None]) -> None:
    """Replaces the record."""
    RECORD.write_text(json.dumps(record, indent=0, ensure_ascii=False) + "\n")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _first(name: str, function: FunctionType) -> list[Change]:
    return sorted(changes_of(function, WIRING), key=lambda change: _hash(key(name, change)))[:1]


def _names(tree: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in _names(node))


def _function(module: Any, name: str) -> FunctionType | None:
    """The function whose code can be replaced, behind what decorates it; it must read no variable of another."""
    found = module
    for part in name.split("."):
        found = vars(found)[part]
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, cached_property):
        found = found.func
    elif isinstance(found, errors.part):
        found = found.make
    elif isinstance(found, errors.checks):
        found = found.listed
    found = inspect.unwrap(found)
    free = isinstance(found, FunctionType) and not found.__code__.co_freevars
    return found if free and found.__qualname__ == name else None
