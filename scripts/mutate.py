"""Does the suite notice a wrong formula? Changes the registered functions, one thing at a time, and counts.

python scripts/mutate.py                      # every loss, and what it calls in rft.algorithm
python scripts/mutate.py --kind advantage     # another registry, or correction, or all
python scripts/mutate.py --only gspo clipped  # these functions

The tests are collected once. A process forked for each mutant puts the changed code into the function that the tests
already hold, and runs the tests that call it, the fastest first, until one fails. Ends with status 1 where fewer than
95 % are noticed.
"""

import argparse
import inspect
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mutation.equivalent import EQUIVALENT
from mutation.operators import Change, changes
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from tensordict import TensorDict
from torch import Tensor

from rft.algorithm import registries
from rft.algorithm.token_weights import correction
from rft.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rft.algorithm."
GOAL = 0.95
KINDS = {
    thing.kind.replace(" ", "_"): {thing.function(name).__module__ for name in thing.names()}
    for thing in vars(registries).values()
    if isinstance(thing, Registry)
}
KINDS |= {"correction": {correction.__name__}}  # rules, not registered functions
KINDS |= {"all": set().union(*KINDS.values())}


@dataclass
class Test:
    """A test that passes as long as nothing is changed."""

    item: pytest.Item
    seconds: float
    calls: set[str]


@dataclass
class Mutant:
    """A change, and what came of it.

    Attributes:
        function: `module.name`, without the package.
        noticed: the first test that failed, with the error; None where all passed.
    """

    function: str
    change: Change
    noticed: str | None = None

    @property
    def crashed(self) -> bool:
        """Whether the test that failed met an error, rather than a number that it did not expect."""
        return self.noticed is not None and not self.noticed.endswith(("AssertionError", "Failed"))

    @property
    def reason(self) -> str | None:
        """Why nobody can notice, if somebody has written it down."""
        return EQUIVALENT.get((self.function, self.change.added))


@dataclass
class Check:
    """The plugin that takes the place of pytest's own loop over the tests."""

    functions: dict[str, FunctionType]
    mutants: list[Mutant]
    console: Console
    tests: list[Test] = field(default_factory=list)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs all tests as they are, then those that concern a mutant, for every mutant."""
        if session.testsfailed:
            self.console.print(f"[yellow]{session.testsfailed} files of tests cannot be imported and are left out")
        ids = {item.nodeid: item for item in session.items}
        plain = forked(lambda: baseline(session.items, self.functions), 3600)
        if not isinstance(plain, list):
            raise RuntimeError(f"the tests as they are: {plain}")
        self.tests = [Test(ids[name], seconds, calls) for name, seconds, calls, passed in plain if passed]
        if failing := [name for name, _, _, passed in plain if not passed]:
            self.console.print(f"[yellow]left out, as they fail by themselves:[/] {escape(', '.join(failing))}")
        self.tests.sort(key=lambda test: test.seconds)
        for mutant in track(self.mutants, "mutants", console=self.console, transient=True):
            self.run(mutant)
        return True

    def run(self, mutant: Mutant) -> None:
        """Sets `noticed`."""
        concerned = [test for test in self.tests if mutant.function in test.calls]

        def changed() -> str | None:
            self.functions[mutant.function].__code__ = mutant.change.code
            return first_failure([test.item for test in concerned])

        mutant.noticed = forked(changed, 10 + 5 * sum(test.seconds for test in concerned))


def main() -> None:
    """Checks the functions that the command line names."""
    parser = argparse.ArgumentParser(description="Changes formulas and counts how many changes the tests notice.")
    parser.add_argument("--kind", choices=sorted(KINDS), default="loss", help="which functions (default: loss)")
    parser.add_argument("--only", nargs="+", metavar="name", help="functions of these names alone")
    parser.add_argument("--tests", nargs="+", default=["tests/algorithm"], help="where tests are (tests/algorithm)")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    functions = reached(KINDS[arguments.kind])
    if arguments.only:
        functions = {name: f for name, f in functions.items() if f.__name__ in arguments.only}
    mutants = [Mutant(name, change) for name, function in functions.items() for change in changes_of(function)]
    check = Check(functions, mutants, console)
    started = time.perf_counter()
    os.chdir(ROOT)
    options = ["-p", "no:terminal", "-p", "no:cacheprovider", "-s", "-m", "not slow", "--import-mode=importlib"]
    if pytest.main([*options, "-o", "addopts=", *arguments.tests], plugins=[check]) == pytest.ExitCode.INTERNAL_ERROR:
        raise SystemExit(1)  # pytest has shown it
    console.print(table(mutants))
    good = report(mutants, console, complete=not arguments.only)
    console.print(f"{len(check.tests)} tests, {time.perf_counter() - started:.0f} s")
    raise SystemExit(0 if good else 1)


def reached(modules: Iterable[str]) -> dict[str, FunctionType]:
    """The formulas of some modules, and the functions of the package that they call."""
    todo: list[FunctionType] = []
    for module in sorted(modules):
        members = list(vars(sys.modules[module]).values())
        algorithms = [algorithm for thing in members if isinstance(thing, type) for algorithm in vars(thing).values()]
        own = [function for function in functions_in([*members, *algorithms]) if function.__module__ == module]
        todo += filter(is_formula, own)
    found: dict[str, FunctionType] = {}
    while todo:
        function = todo.pop(0)
        name = f"{function.__module__.removeprefix(PACKAGE)}.{function.__qualname__}"
        if name not in found and function.__module__.startswith(PACKAGE):
            found[name] = function
            todo += functions_in(function.__globals__.get(name) for name in function.__code__.co_names)
    return found


def functions_in(things: Iterable[Any]) -> list[FunctionType]:
    """The functions among some things, also those behind a decorator and those in a dictionary."""
    found = []
    for thing in things:
        inner = thing.values() if isinstance(thing, dict) else [thing]
        found += [inspect.unwrap(part) for part in inner if callable(part)]
    return [function for function in found if isinstance(function, FunctionType)]


def is_formula(function: FunctionType) -> bool:
    """Whether a function computes; others look at options, and state a fact about a plugin."""
    return any(kind in (Tensor, TensorDict) for kind in function.__annotations__.values())


def changes_of(function: FunctionType) -> list[Change]:
    """Every change of a function."""
    return changes(Path(function.__code__.co_filename).read_text(), function.__qualname__)


def baseline(items: list[pytest.Item], functions: dict[str, FunctionType]) -> list[tuple[str, float, set[str], bool]]:
    """Of every test: its id, its seconds, the functions that it calls, and whether it passes."""
    names = {id(function.__code__): name for name, function in functions.items()}
    calls: set[str] = set()

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        if id(frame.f_code) in names:
            calls.add(names[id(frame.f_code)])

    threading.settrace(trace)
    found = []
    for number, item in enumerate(items):
        calls.clear()
        sys.settrace(trace)
        started = time.perf_counter()
        reports = runtestprotocol(item, log=False, nextitem=next(iter(items[number + 1 :]), None))
        seconds = time.perf_counter() - started
        sys.settrace(None)
        found.append((item.nodeid, seconds, set(calls), not any(report.failed for report in reports)))
    return found


def first_failure(items: list[pytest.Item]) -> str | None:
    """Runs tests until one fails; its id and its error."""
    for number, item in enumerate(items):
        for report in runtestprotocol(item, log=False, nextitem=next(iter(items[number + 1 :]), None)):
            if report.failed:
                return f"{item.nodeid}: {str(report.longrepr).splitlines()[-1]}"
    return None


def forked(work: Callable[[], Any], seconds: float) -> Any:
    """What `work` returns in a process of its own, or a sentence on the signal that ended it.

    Raises:
        RuntimeError: `work` raised.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends the process
        try:
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(work(), pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"the process ended by {signal.Signals(os.WTERMSIG(status)).name} within {seconds:.0f} s"
    if not answer:
        raise RuntimeError("the process ended without an answer")
    return pickle.loads(answer)


def table(mutants: list[Mutant]) -> Table:
    """The counts of every function."""
    shown = Table(title="changes that a test notices")
    for title in ("function", "changes", "noticed", "survived", "equivalent"):
        shown.add_column(title, justify="left" if title == "function" else "right", overflow="fold")
    for name in dict.fromkeys(mutant.function for mutant in mutants):
        found = Counter(outcome(mutant) for mutant in mutants if mutant.function == name)
        kinds = [str(found[kind] or "") for kind in ("noticed", "survived", "equivalent")]
        shown.add_row(name, str(found.total()), *kinds)
    return shown


def outcome(mutant: Mutant) -> str:
    """The column in which a mutant is counted."""
    return "noticed" if mutant.noticed else "equivalent" if mutant.reason else "survived"


def report(mutants: list[Mutant], console: Console, complete: bool) -> bool:
    """Prints the survivors and the share; whether it is enough and the list of equivalents is true."""
    for mutant in mutants:
        if outcome(mutant) == "survived":
            change = mutant.change
            console.print(f"\n[bold]{mutant.function}[/], line {change.line}, {change.operator}", highlight=False)
            for color, mark, text in (("red", "-", change.removed), ("green", "+", change.added)):
                for line in text.splitlines():
                    console.print(f"[{color}]{mark} {escape(line)}", highlight=False)
    wrong = untrue(mutants, complete)
    for sentence in wrong:
        console.print(f"[red]listed as equivalent:[/] {escape(sentence)}", highlight=False)
    counts = Counter(outcome(mutant) for mutant in mutants)
    judged = counts["noticed"] + counts["survived"]
    share = counts["noticed"] / max(judged, 1)
    crashed = sum(mutant.crashed for mutant in mutants)
    console.print(
        f"\n{counts['noticed']} of {judged} changes are noticed: [bold]{share:.1%}[/] ({crashed} of them by an error "
        f"that is no failed assertion); {counts['equivalent']} more change nothing",
        highlight=False,
    )
    return share >= GOAL and not wrong


def untrue(mutants: list[Mutant], complete: bool) -> list[str]:
    """What is wrong with the list of equivalents; with all functions at hand, also what it lists in vain."""
    listed = {(mutant.function, mutant.change.added): mutant for mutant in mutants}
    found = [
        f"{key} is noticed by {listed[key].noticed}" for key in EQUIVALENT if key in listed and listed[key].noticed
    ]
    functions = {mutant.function for mutant in mutants}
    vain = [key for key in EQUIVALENT if complete and key[0] in functions and key not in listed]
    return found + [f"{key} is no change" for key in vain]


if __name__ == "__main__":
    main()
