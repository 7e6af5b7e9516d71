"""Cases of a program as a row of a data set has them, and programs that pass them, which mode=verify runs."""

import ast
import builtins
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rft.reward.sandbox.isolation.harness import plain

Asserts = Literal["outside", "inside"]
FORMS = (
    "write a list of {input, output}, of {function, args, expected}, of {call, expected} or of assert statements, "
    "{inputs, outputs} with or without fn_name, or a text with assert statements or check(candidate)"
)
CHECK = "check"  # HumanEval's function of the tests
Answers = list[tuple[tuple[Any, ...], dict[str, Any], Any]]  # arguments by position and by name, value

STDIN = """\
import sys
print({runs!r}[sys.stdin.read()])
"""
FUNCTION = """\
def {name}(*args, **named):
    return next(value for positions, names, value in {answers!r} if (positions, names) == (args, named))
"""


@dataclass(frozen=True)
class StdinCase:
    """A run of the program: what it reads from stdin, and what it must print."""

    input: str
    output: str


@dataclass(frozen=True)
class Call:
    """A value that the harness computes in the sandbox.

    Attributes:
        request: {function, args} or {expression}, for the harness.
        accepted: the values of which it must equal one; they stay outside.
    """

    request: dict[str, Any]
    accepted: list[Any]


@dataclass(frozen=True)
class Script:
    """Tests that run in a process of their own, and call the program in another one.

    Attributes:
        setup: imports and functions of the tests.
        tests: statements; one passes if it raises no error.
        names: of functions of the program.
    """

    setup: str
    tests: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Cases:
    """The tests of a row: runs, calls, or a script.

    Attributes:
        runs: each is a run of the program.
        calls: all are evaluated in one run of the program.
        setup: imports in front of the calls.
        script: see `Script`.
    """

    runs: tuple[StdinCase, ...] = ()
    calls: tuple[Call, ...] = ()
    setup: str = ""
    script: Script | None = None

    def __len__(self) -> int:
        """The number of tests."""
        return len(self.runs) + len(self.calls) + (len(self.script.tests) if self.script else 0)


def read_tests(value: Any, field: str, asserts: Asserts, entry_point: str | None = None) -> Cases:
    """The tests in a field of a row.

    Args:
        value: of the field: a list, a mapping, or a text with JSON or with statements.
        field: its name, for messages.
        asserts: where an assert statement runs whose expected value is no literal.
        entry_point: the name of the function that `check(candidate)` tests, or that tests without a name call.

    Raises:
        ValueError: there is no test, or its form is not known; names the field and the cure.
    """
    try:
        tests = _Reader(asserts, entry_point).read(value)
    except (KeyError, TypeError, ValueError, SyntaxError, RecursionError) as error:
        what = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"the field {field!r} has no tests that can be read ({what}); {FORMS}") from error
    if not tests:
        raise ValueError(f"the field {field!r} has no tests, so no program is right; {FORMS}, or remove the row")
    return tests


@dataclass(frozen=True)
class _Reader:
    """Reads tests; the attributes are arguments of `read_tests`."""

    asserts: Asserts
    entry_point: str | None

    def read(self, value: Any) -> Cases:
        if isinstance(value, str):
            try:
                parsed = json.loads(value)
            except json.JSONDecodeError:
                return read_statements(value, self.asserts, self.entry_point)
            if isinstance(parsed, str):
                raise ValueError("a JSON text")
            return self.read(parsed)
        if isinstance(value, Mapping):
            return _pairs(value)
        if not isinstance(value, Sequence):
            raise ValueError(f"a {type(value).__name__}")
        if all(isinstance(test, str) for test in value):
            return read_statements("\n".join(value), self.asserts, self.entry_point)
        if all("testtype" in test and test["testtype"] == "functional" for test in value):  # LiveCodeBench
            if self.entry_point is None:
                raise ValueError("they are functional; set entry_point to the field with the function's name")
            pairs = {name: [test[name] for test in value] for name in ("input", "output")}
            return _pairs({**pairs, "fn_name": self.entry_point})
        if all("input" in test for test in value):
            return Cases(runs=tuple(StdinCase(_text(test["input"]), _text(test["output"])) for test in value))
        return Cases(calls=tuple(map(_call, value)))


def _text(value: Any) -> str:
    """A text, or the lines of one."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _call(one: Mapping[str, Any]) -> Call:
    accepted = [plain(one["expected"])]
    if "call" in one:
        return Call({"expression": ast.unparse(ast.parse(one["call"], mode="eval"))}, accepted)
    return Call({"function": _name(one["function"]), "args": plain(list(one["args"]))}, accepted)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError(f"{value!r} is no name of a function")
    return value


def _pairs(value: Mapping[str, Any]) -> Cases:
    """The form of verl, PRIME and APPS: {"inputs": [...], "outputs": [...], "fn_name": name or none}.

    Those of CodeContests are `input` and `output`.
    """
    given, printed = ("inputs", "outputs") if "inputs" in value else ("input", "output")
    pairs = list(zip(value[given], value[printed], strict=True))
    if value.get("fn_name") is None:
        return Cases(runs=tuple(StdinCase(_text(read), _text(printed)) for read, printed in pairs))
    name, calls = _name(value["fn_name"]), []
    for args, returned in pairs:
        if isinstance(args, str):  # LiveCodeBench: one argument a line, each as JSON
            args, returned = [json.loads(line) for line in args.splitlines()], json.loads(returned)
        accepted = [plain(returned)]
        if isinstance(returned, list) and len(returned) == 1:  # APPS wraps some values into a list
            accepted.append(plain(returned[0]))
        calls.append(Call({"function": name, "args": plain(list(args))}, accepted))
    return Cases(calls=tuple(calls))


def read_statements(text: str, asserts: Asserts, entry_point: str | None) -> Cases:
    """Tests that are Python: assert statements, or HumanEval's function check(candidate).

    They are calls, whose values are compared, if each asserts that a call has a literal value. Otherwise they run in a
    process of their own or, with `asserts: inside`, in that of the program.
    """
    body = ast.parse(text).body
    checks = [one for one in body if isinstance(one, ast.FunctionDef) and one.name == CHECK]
    if checks and not any(_calls_check(one) for one in body):
        if entry_point is None:
            raise ValueError(f"they define {CHECK}(candidate); set entry_point to the field with the function's name")
        body = [one for one in body if one is not checks[-1]] + _check_body(checks[-1], entry_point)
    body = [one for one in body if not _has_no_effect(one, body)]
    imports = [one for one in body if isinstance(one, ast.Import | ast.ImportFrom)]
    tests = [one.test for one in body if isinstance(one, ast.Assert)]
    if len(imports) + len(tests) == len(body):
        others = set().union(*map(_bound, imports)) | vars(builtins).keys()
        calls = [_compared(test, others) or (_inside(test) if asserts == "inside" else None) for test in tests]
        if None not in calls:
            return Cases(calls=tuple(filter(None, calls)), setup=_source(imports))
    if not any(isinstance(one, ast.Assert) for statement in body for one in ast.walk(statement)):
        raise ValueError("without an assert statement every program would pass")
    script = _script(body, entry_point)
    if not script.names:
        raise ValueError("they call no function of the program; set entry_point if it has the name of a built-in one")
    return Cases(script=script)


def _calls_check(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == CHECK


def _check_body(check: ast.FunctionDef, entry_point: str) -> list[ast.stmt]:
    """The assert statements of check(candidate), about the function itself; other bodies stay a function."""
    (parameter,) = [node.arg for node in check.args.args]
    names = [node for node in ast.walk(check) if isinstance(node, ast.Name)]
    if all(isinstance(node, ast.Assert) or _is_text(node) for node in check.body) and entry_point not in _bound(check):
        for name in names:
            name.id = entry_point if name.id == parameter else name.id
        return check.body
    return [check, ast.parse(f"{CHECK}({_name(entry_point)})").body[0]]


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _has_no_effect(statement: ast.stmt, body: list[ast.stmt]) -> bool:
    """A text, `assert True`, or a literal that is not used, such as HumanEval's METADATA."""
    if isinstance(statement, ast.Assign) and _literal(statement.value):
        names = {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        return not any(names & _loaded(other) for other in body)
    if isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant):
        return bool(statement.test.value)
    return _is_text(statement)


def _script(body: list[ast.stmt], entry_point: str | None) -> Script:
    """Imports and functions are the setup; of the rest, each assert statement is a test, or else all are one."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    setup = [statement for statement in body if isinstance(statement, kinds)]
    rest = [statement for statement in body if not isinstance(statement, kinds)]
    single = all(isinstance(statement, ast.Assert) for statement in rest)
    tests = tuple(map(ast.unparse, rest)) if single else (_source(rest),)
    bound, loaded = set().union(*map(_bound, body)), set().union(*map(_loaded, body))
    tested = {entry_point} if entry_point else set()
    return Script(_source(setup), tests, tuple(sorted(tested | loaded - bound - vars(builtins).keys())))


def _source(statements: Iterable[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, statements))


def _loaded(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _bound(tree: ast.AST) -> set[str]:
    """The names to which a tree gives a value anywhere."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names


def _compared(test: ast.expr, others: set[str]) -> Call | None:
    """`assert f(1) == 2` is the call `f(1)`, whose value is compared outside with 2; `assert f(1)`, with True.

    Of `assert (f(1) == 2) == True` an object of the program would compute the value, so it is none.

    Args:
        test: of the assert statement.
        others: names of functions that are not the program's.
    """
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        for one, other in ((test.left, test.comparators[0]), (test.comparators[0], test.left)):
            if _literal(other) and not _literal(one):
                if isinstance(ast.literal_eval(other), bool) and not _calls_program(one, others):
                    return None
                return Call({"expression": ast.unparse(one)}, [plain(ast.literal_eval(other))])
    inner, wanted = test, True
    while isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.Not):
        inner, wanted = inner.operand, not wanted
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
        arguments = [*inner.args, *(keyword.value for keyword in inner.keywords)]
        if all(map(_literal, arguments)):
            return Call({"expression": f"bool({ast.unparse(inner)})"}, [wanted])
    return None


def _calls_program(node: ast.expr, others: set[str]) -> bool:
    """Whether an expression is a call of a function of the program, or of a method of such a call's value."""
    if not isinstance(node, ast.Call):
        return False
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id not in others


def _inside(test: ast.expr) -> Call:
    return Call({"expression": f"bool({ast.unparse(test)})"}, [True])


def _literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


def gold_program(tests: Cases) -> str | None:
    """A program that passes all tests; None if a test is anything but a run or a function of literals."""
    if tests.script is not None:
        return None
    if tests.runs:
        return STDIN.format(runs={case.input: case.output for case in tests.runs})
    answers: dict[str, Answers] = {}
    for call in tests.calls:
        if (request := _arguments(call)) is None:
            return None
        name, positions, named = request
        answers.setdefault(name, []).append((positions, named, call.accepted[0]))
    functions = [FUNCTION.format(name=name, answers=entries) for name, entries in answers.items()]
    return "\n".join(["from math import inf", *functions])


def _arguments(call: Call) -> tuple[str, tuple[Any, ...], dict[str, Any]] | None:
    """The function that a test calls, and its arguments; None if it is none, or an argument is no literal."""
    if "function" in call.request:
        return call.request["function"], tuple(call.request["args"]), {}
    node = ast.parse(call.request["expression"], mode="eval").body
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "bool" and node.args:
        node = node.args[0]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    try:
        named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        return node.func.id, tuple(map(ast.literal_eval, node.args)), named
    except (ValueError, TypeError, SyntaxError):
        return None
