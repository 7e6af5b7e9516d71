"""The share of its tests that a program passes, or whether it passes all; programs run in the sandbox."""

import json
import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from pathlib import Path
from typing import Any, ClassVar, Literal

from rft.ranges import NonNegativeFloat
from rft.reward.sandbox.cases import Asserts, Call, Cases, Script, StdinCase, gold_program, read_tests
from rft.reward.sandbox.isolation import harness
from rft.reward.sandbox.programs import Outcome, SandboxOptions
from rft.reward.sandbox.sandbox import Sandbox
from rft.reward.sandbox.separate import count_passed
from rft.reward.term import RowTerm, Unscored

HARNESS = f"{Path(harness.__file__).read_text()}\nmain()\n"
BLOCK = re.compile(r"^[ \t]*```(?:python3?|py)[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE | re.IGNORECASE)
PRINTED = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")  # not 007
DECIMALS = Context(Emax=MAX_EMAX, Emin=MIN_EMIN)  # holds every number that a program can print
DIGITS = 4300  # of an integer that Python reads by default; its time grows with the square of the digits


@dataclass(frozen=True)
class ProgramOptions:
    """The options of a term that runs programs.

    Attributes:
        field: of the row, with the tests; see `read_tests` for their forms.
        program: `last_block` is the last fenced block of Python, `whole` the whole response.
        score: `all` is 1 if every test passes, else 0; `share` is the share that passes.
        entry_point: of the row, with the name of the function that tests of HumanEval's form call; None: no such field.
        asserts: `outside` runs an assert statement whose expected value is no literal in a process without the program,
            `inside` in that of the program.
        stdout: `numbers` compares lines of numbers by their values, `text` all lines as texts.
        tolerance: of floating point numbers: relative and absolute of those that a function returns, relative of
            printed ones.
        prelude: Python source in front of every program, such as imports.
    """

    field: str
    program: Literal["last_block", "whole"]
    score: Literal["all", "share"]
    entry_point: str | None
    asserts: Asserts
    stdout: Literal["numbers", "text"]
    tolerance: NonNegativeFloat
    prelude: str


class ProgramTests(RowTerm):
    """Runs the program in a response on the tests of its row. A program that fails or exceeds a limit fails the test.

    Args:
        options: an object of `Options`.

    Attributes:
        Options: the class of the options.
        options: as given.
    """

    Options: ClassVar[type[ProgramOptions]] = ProgramOptions
    in_workers: ClassVar[bool] = False
    thoughts = "skip"

    def __init__(self, options: ProgramOptions) -> None:
        self.options = options
        entry_point = options.entry_point
        self.reads = (options.field,) if entry_point is None else (options.field, entry_point)
        self._all = options.score == "all"
        self.others = "zero" if self._all else "less"

    @abstractmethod
    def run(self, program: str, stdin: str) -> Outcome:
        """Runs a program to its end. `refused`: it could not be run, which says nothing about the program."""

    @abstractmethod
    def count_passed(self, program: str, script: Script) -> int | Unscored:
        """How many tests of a script a program passes."""

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Checks that the row has tests. Raises a ValueError that names the field and the cure."""
        self._tests(row)

    def _tests(self, row: Mapping[str, Any]) -> Cases:
        field, entry_point = self.options.field, self.options.entry_point
        name = None if entry_point is None else str(row[entry_point])
        return read_tests(row[field], field, self.options.asserts, name)

    def gold_responses(self, row: Mapping[str, Any]) -> Sequence[str]:
        """A program that knows the expected values."""
        program = gold_program(self._tests(row))
        if program is None:
            return ()
        block = f"So I write:\n```python\n{program}```\nIt passes.\n"
        return (block if self.options.program == "last_block" else program,)

    def value(self, response: str, row: Mapping[str, Any]) -> float | Unscored:
        """1, 0 or a share; `Unscored` where the sandbox itself fails."""
        tests = self._tests(row)
        program = extract_program(response) if self.options.program == "last_block" else response
        if program is None:
            return 0.0
        prelude = self.options.prelude
        passed = self._passed(f"{prelude}\n{program}" if prelude else program, tests)
        if isinstance(passed, Unscored):
            return passed
        return float(passed == len(tests)) if self._all else passed / len(tests)

    def _passed(self, program: str, tests: Cases) -> int | Unscored:
        """The number of tests that pass; with `score: all`, runs after the first that fails are left out."""
        if tests.calls:
            return self._passed_calls(program, tests)
        if tests.script is not None:
            return self.count_passed(program, tests.script)
        passed, tolerance = 0, self.options.tolerance if self.options.stdout == "numbers" else None
        for case in tests.runs:
            outcome = self.run(program, case.input)
            if outcome.status == "refused":
                return _unscored(outcome)
            right = passes(case, outcome, tolerance)
            passed += right
            if self._all and not right:
                break
        return passed

    def _passed_calls(self, program: str, tests: Cases) -> int | Unscored:
        request = {"program": program, "setup": tests.setup, "calls": [call.request for call in tests.calls]}
        outcome = self.run(HARNESS, json.dumps(request))
        if outcome.status == "refused":
            return _unscored(outcome)
        if self._all and outcome.status != "ok":
            return 0
        return count_right(tests.calls, outcome.stdout, self.options.tolerance)


@dataclass(frozen=True)
class CodeOptions(ProgramOptions):
    """The options of `CodeTests`.

    Attributes:
        sandbox: how programs are isolated.
    """

    sandbox: SandboxOptions


class CodeTests(ProgramTests):
    """Tests programs in the sandbox on this machine.

    Args:
        key: supplied; the term's place in the yaml.
        options: as in `ProgramTests`.
    """

    Options = CodeOptions

    def __init__(self, key: str, options: CodeOptions) -> None:
        super().__init__(options)
        self._sandbox = Sandbox(options.sandbox, f"{key}.sandbox")
        self.threads = options.sandbox.workers

    def check(self) -> None:
        self._sandbox.check()

    def run(self, program: str, stdin: str) -> Outcome:
        return self._sandbox.run(program, stdin)

    def count_passed(self, program: str, script: Script) -> int | Unscored:
        return count_passed(self._sandbox, program, script)


def _unscored(outcome: Outcome) -> Unscored:
    return Unscored(f"the sandbox failed: {outcome.reason}")


def extract_program(response: str) -> str | None:
    """The last fenced block of Python in a response, None without one."""
    blocks = BLOCK.findall(response)
    return blocks[-1] if blocks else None


def passes(case: StdinCase, outcome: Outcome, tolerance: float | None) -> bool:
    """Whether a run has exit status 0 and printed the lines of its case, up to white space at their ends.

    Args:
        case: of the run.
        outcome: of the run.
        tolerance: relative, of numbers; None: lines of numbers are compared as texts too.
    """
    if outcome.status != "ok":
        return False
    printed, expected = _lines(outcome.stdout), _lines(case.output)
    if printed == expected or tolerance is None:
        return printed == expected
    pairs = zip(printed, expected, strict=False)
    return len(printed) == len(expected) and all(one == other or _same(one, other, tolerance) for one, other in pairs)


def _same(printed: str, expected: str, tolerance: float) -> bool:
    """Whether two lines are the same numbers; one that is expected without decimals must be equal."""
    pairs = list(zip(printed.split(), expected.split(), strict=False))
    if len(printed.split()) != len(expected.split()) or not pairs:
        return False
    for one, other in pairs:
        if not PRINTED.fullmatch(one) or not PRINTED.fullmatch(other):
            return False
        number, right = Decimal(one), Decimal(other)
        most = Decimal(tolerance) if re.search("[.eE]", other) else Decimal(0)
        difference = DECIMALS.abs(DECIMALS.subtract(number, right))
        if number != right and difference > DECIMALS.multiply(most, DECIMALS.abs(right)):
            return False
    return True


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def count_right(calls: Sequence[Call], stdout: str, tolerance: float) -> int:
    """How many calls have returned a value that is accepted. What is no line of the harness is ignored.

    Args:
        calls: with the values that are accepted.
        stdout: of the harness, which the program can write too.
        tolerance: of floating point numbers.
    """
    values: dict[int, Any] = {}
    for line in stdout.split("\n"):
        try:
            number, value = json.loads(line, parse_int=_integer)
            if type(number) is int:
                values[number] = value
        except (ValueError, TypeError, RecursionError):  # the program wrote it
            continue
    return sum(
        number in values and any(equal(values[number], accepted, tolerance) for accepted in call.accepted)
        for number, call in enumerate(calls)
    )


def _integer(digits: str) -> int | Decimal:
    return int(digits) if len(digits) <= DIGITS else Decimal(digits)


def equal(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether two values of JSON are equal, floating point numbers up to a tolerance."""
    numbers = [isinstance(one, int | float) and not isinstance(one, bool) for one in (value, expected)]
    if all(numbers) and (isinstance(value, float) or isinstance(expected, float)):
        try:
            return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # a whole number beyond the floating point numbers
            return False
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(equal, value, expected, [tolerance] * len(value)))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(equal(value[key], expected[key], tolerance) for key in expected)
    return bool(value == expected)
