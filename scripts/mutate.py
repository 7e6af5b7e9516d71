"""Does the suite notice a wrong formula, or a wrong connection? Changes functions, one thing at a time, and counts.

python scripts/mutate.py                       # every loss, and what it calls in rft.algorithm
python scripts/mutate.py --kind advantage      # another registry, or correction, or all
python scripts/mutate.py --only gspo clipped   # these functions
python scripts/mutate.py --kind all --since X  # those that git shows as changed since X, and a seventh of the others
python scripts/mutate.py --kind wiring         # what a test has noticed in the packages around rft.algorithm
python scripts/mutate.py --kind wiring --record

The tests are collected once. A process forked for each mutant puts the changed code into the function that the tests
already hold, and runs the tests that call it, the fastest first, until one fails. Ends with status 1 where fewer than
95 % are noticed.

The wiring is a sample of 150 changes. `--record` writes for each which test notices it: scripts/mutation/wiring.json.
Without it, the changes that have a test there are made again, and each must be noticed. Either way the tests of the
record run first, and the others only if something is left that those do not notice.
"""

import argparse
import inspect
import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol
from mutation import wiring
from mutation.equivalent import EQUIVALENT
from mutation.forked import forked, silence
from mutation.operators import Change, changes_of, preceded
from mutation.revision import changed_and_seventh
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from tensordict import TensorDict
from torch import Tensor

from rft import algorithm
from rft.algorithm.token_weights import correction
from rft.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "rft.algorithm."
GOAL = 0.95
MOST_S = 120.0  # of tests for a mutant; what they take without it
LONGEST_S = 3 * 3600.0
MOST_GONE = 0.1  # of the record of the wiring
FAILS = " fails: "
KINDS = {
    thing.kind.replace(" ", "_"): {thing.function(name).__module__ for name in thing.names()}
    for thing in vars(algorithm).values()
    if isinstance(thing, Registry)
}
KINDS |= {"correction": {correction.__name__}}  # rules, not registered functions
KINDS |= {"all": set().union(*KINDS.values())}


@dataclass
class Test:
    """A test that passes as long as nothing is changed."""

    item: pytest.Item
    seconds: float
    calls: list[str]

    @property
    def limit(self) -> float:
        """Seconds after which it hangs."""
        return 20 + 5 * self.seconds


@dataclass
class Mutant:
    """A change, and what came of it.

    Attributes:
        function: `module.name`, without the package.
        noticed: the first test that fails, with the error; None where all pass.
    """

    function: str
    change: Change
    noticed: str | None = None

    @property
    def test(self) -> str | None:
        """The test in `noticed`."""
        return self.noticed and self.noticed.partition(FAILS)[0]

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
    """The plugin that takes the place of pytest's own loop over the tests.

    Attributes:
        first: the ids of the tests that run first; the others run for what these leave unnoticed.
        processes: how many run tests at the same time.
        each: whether a line is printed for each mutant.
    """

    functions: dict[str, FunctionType]
    mutants: list[Mutant]
    console: Console
    first: set[str]
    processes: int
    each: bool
    tests: list[Test] = field(default_factory=list)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the tests as they are, then those that concern a mutant, for every mutant."""
        if session.testsfailed:
            self.console.print(f"[yellow]{session.testsfailed} files of tests cannot be imported and are left out")
        first = [item for item in session.items if item.nodeid in self.first]
        for items in (first, [item for item in session.items if item.nodeid not in self.first]):
            unnoticed = [mutant for mutant in self.mutants if mutant.noticed is None]
            if items and unnoticed:
                self.run(items, unnoticed)
        return True

    def run(self, items: list[pytest.Item], mutants: list[Mutant]) -> None:
        """Sets `noticed` of the mutants that these tests notice."""
        files = list(dict.fromkeys(item.path for item in items))
        shares = [{*files[number :: self.processes]} for number in range(self.processes)]
        parts = [[item for item in items if item.path in share] for share in shares]
        ids = {item.nodeid: item for item in items}
        tests = []
        for name, seconds, calls, passed in lists([partial(baseline, part, self.functions) for part in parts]):
            if passed:
                tests.append(Test(ids[name], seconds, calls))
            else:
                self.console.print(f"[yellow]left out, as it fails by itself:[/] {escape(name)}")
        self.tests += tests
        self.console.print(f"{len(tests)} tests as they are: {sum(test.seconds for test in tests):.0f} s")
        places = [range(number, len(mutants), self.processes) for number in range(self.processes)]
        for place, noticed in lists([partial(self.notice, tests, mutants, part) for part in places]):
            mutants[place].noticed = noticed

    def notice(self, tests: list[Test], mutants: list[Mutant], places: Sequence[int]) -> list[tuple[int, str | None]]:
        """The first test that fails of some of the mutants, by their places."""

        def changed(mutant: Mutant, concerned: list[Test]) -> str | None:
            self.functions[mutant.function].__code__ = mutant.change.code
            return first_failure(concerned)

        found = []
        for place in track(places, "mutants", console=self.console, transient=True):
            mutant = mutants[place]
            concerned = chosen([test for test in tests if mutant.function in test.calls])
            limit = 60 + 5 * sum(test.seconds for test in concerned)
            (noticed,) = forked([partial(changed, mutant, concerned)], limit)
            if noticed and mutant.reason:  # a test may fail once on a machine with much else to do
                (noticed,) = forked([partial(changed, mutant, concerned)], limit)
            if self.each:
                self.console.print(f"{mutant.function}: {noticed or 'not noticed'}", markup=False, highlight=False)
            found.append((place, noticed))
        return found


def main() -> None:
    """Checks the functions that the command line names."""
    parser = argparse.ArgumentParser(description="Changes functions and counts how many changes the tests notice.")
    parser.add_argument("--kind", choices=[*sorted(KINDS), "wiring"], default="loss", help="which functions (loss)")
    parser.add_argument("--only", nargs="+", metavar="name", help="functions of these names alone")
    parser.add_argument("--since", metavar="revision", help="functions that have changed, and a seventh of the others")
    parser.add_argument("--record", action="store_true", help="of --kind wiring: writes which test notices what")
    parser.add_argument("--tests", nargs="+", help="where tests are (tests/algorithm; of the wiring, all)")
    parser.add_argument("-j", type=int, default=1, dest="processes", help="how many tests run at the same time (1)")
    arguments = parser.parse_args()
    console = Console(soft_wrap=True)
    wires = arguments.kind == "wiring"
    record = wiring.read() if wires else {}
    functions = wiring.functions() if wires else reached(KINDS[arguments.kind])
    if arguments.only:
        functions = {name: f for name, f in functions.items() if f.__name__ in arguments.only}
    if arguments.since:
        functions = changed_and_seventh(arguments.since, functions)
    if wires:
        found = wiring.sample(functions) if arguments.record else wiring.recorded(functions, record)
    else:
        found = every(functions)
    mutants = [Mutant(name, change) for name, change in found]
    console.print(f"{len(mutants)} changes of {len({mutant.function for mutant in mutants})} functions")
    functions = {mutant.function: functions[mutant.function] for mutant in mutants}
    check = Check(functions, mutants, console, set(filter(None, record.values())), arguments.processes, each=wires)
    started = time.perf_counter()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    options = ["-p", "no:terminal", "-p", "no:cacheprovider", "-s", "-m", "not slow", "--import-mode=importlib"]
    tests = arguments.tests or (["tests", "--ignore=tests/scripts"] if wires else ["tests/algorithm"])
    if pytest.main([*options, "-o", "addopts=", *tests], plugins=[check]) == pytest.ExitCode.INTERNAL_ERROR:
        raise SystemExit(1)  # pytest has shown it
    console.print(table(mutants, by_package=wires))
    good = report(mutants, console, 1.0 if wires else GOAL)
    if (
        gone := []
        if arguments.only or arguments.record
        else wiring.gone(record, [(mutant.function, mutant.change) for mutant in mutants])
    ):
        console.print(f"[yellow]the record names {len(gone)} changes of lines that the code has no more; see --record")
        good = good and len(gone) <= MOST_GONE * len(record)
    if arguments.record:
        wiring.write({wiring.key(mutant.function, mutant.change): mutant.test for mutant in mutants})
        good = True
    console.print(f"{len(check.tests)} tests, {time.perf_counter() - started:.0f} s")
    raise SystemExit(0 if good else 1)


def lists(works: Sequence[Callable[[], list[Any]]]) -> list[Any]:
    """The entries of the lists that processes return.

    Raises:
        RuntimeError: one of them ended without.
    """
    answers = forked(works, LONGEST_S)
    if failed := [answer for answer in answers if isinstance(answer, str)]:
        raise RuntimeError(failed[0])
    return [entry for answer in answers for entry in answer]


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


def every(functions: dict[str, FunctionType]) -> list[tuple[str, Change]]:
    """All changes of functions."""
    return [(name, change) for name, function in functions.items() for change in changes_of(function)]


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


def baseline(items: list[pytest.Item], functions: dict[str, FunctionType]) -> list[tuple[str, float, list[str], bool]]:
    """Of every test: its id, its seconds, the functions that it calls, and whether it passes."""
    silence()
    calls: set[str] = set()
    for name, function in functions.items():
        function.__globals__["_called"] = calls.add
        function.__code__ = preceded(function, f"_called({name!r})")
    found = []
    for number, item in enumerate(items):
        calls.clear()
        started = time.perf_counter()
        reports = runtestprotocol(item, log=False, nextitem=next(iter(items[number + 1 :]), None))
        seconds = time.perf_counter() - started
        found.append((item.nodeid, seconds, sorted(calls), not any(report.failed for report in reports)))
    return found


def first_failure(tests: list[Test]) -> str | None:
    """Runs tests until one fails, or takes far longer than it did; its id and its error."""
    silence()
    signal.signal(signal.SIGALRM, late)
    items = [test.item for test in tests]
    for number, (test, item) in enumerate(zip(tests, items, strict=True)):
        signal.setitimer(signal.ITIMER_REAL, test.limit)
        for report in runtestprotocol(item, log=False, nextitem=next(iter(items[number + 1 :]), None)):
            if report.failed:
                with suppress(Exception):  # the change may well break what ends the module, too
                    item.session._setupstate.teardown_exact(None)
                return f"{item.nodeid}{FAILS}{str(report.longrepr).splitlines()[-1]}"
    return None


def late(signal_number: int, frame: FrameType | None) -> None:
    """Ends a test that waits, or does not stop."""
    raise TimeoutError


def chosen(tests: list[Test]) -> list[Test]:
    """Tests of at most `MOST_S` seconds: half of it by the fastest, half by the fastest of each file, then the second
    of each, and so on. So tests of a unit and tests of whole runs are among them."""
    fastest = sorted(tests, key=lambda test: test.seconds)
    ranks: Counter[Path] = Counter()
    ranked = []
    for test in fastest:
        ranks[test.item.path] += 1
        ranked.append((ranks[test.item.path], test))
    kept = set()
    for order in (fastest, [test for _, test in sorted(ranked, key=lambda entry: entry[0])]):
        sums = accumulate(test.seconds for test in order)
        kept |= {test.item.nodeid for test, total in zip(order, sums, strict=True) if total <= MOST_S / 2}
    return [test for test in fastest if test.item.nodeid in kept]


def table(mutants: list[Mutant], by_package: bool) -> Table:
    """The counts of every function, or of every package."""
    shown = Table(title="changes that a test notices")
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        rows[mutant.function.partition(".")[0] if by_package else mutant.function][outcome(mutant)] += 1
    for title in ("package" if by_package else "function", "changes", "noticed", "survived", "equivalent"):
        shown.add_column(title, justify="right" if shown.columns else "left", overflow="fold")
    for name, found in rows.items():
        kinds = [str(found[kind] or "") for kind in ("noticed", "survived", "equivalent")]
        shown.add_row(name, str(found.total()), *kinds)
    return shown


def outcome(mutant: Mutant) -> str:
    """The column in which a mutant is counted."""
    return "noticed" if mutant.noticed else "equivalent" if mutant.reason else "survived"


def report(mutants: list[Mutant], console: Console, goal: float) -> bool:
    """Prints the survivors and the share; whether it is enough and the list of equivalents is true."""
    for mutant in mutants:
        if outcome(mutant) == "survived":
            change = mutant.change
            console.print(f"\n[bold]{mutant.function}[/], line {change.line}, {change.operator}", highlight=False)
            for color, mark, text in (("red", "-", change.removed), ("green", "+", change.added)):
                for line in text.splitlines():
                    console.print(f"[{color}]{mark} {escape(line)}", highlight=False)
    wrong = untrue(mutants)
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
    return share >= goal and not wrong


def untrue(mutants: list[Mutant]) -> list[str]:
    """What is wrong with the list of equivalents: a test notices one, or the function has no such change."""
    listed = {(mutant.function, mutant.change.added): mutant for mutant in mutants}
    found = [
        f"{key} is noticed by {listed[key].noticed}" for key in EQUIVALENT if key in listed and listed[key].noticed
    ]
    functions = {mutant.function for mutant in mutants}
    return found + [f"{key} is no change" for key in EQUIVALENT if key[0] in functions and key not in listed]


if __name__ == "__main__":
    main()
