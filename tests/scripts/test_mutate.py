"""The mutation check: each operator on a made-up function, and the loop around one."""

import gc
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import mutate  # noqa: E402
from mutate import KINDS, Mutant, chosen, main, outcome, reached, untrue  # noqa: E402
from mutation import wiring  # noqa: E402
from mutation.forked import forked  # noqa: E402
from mutation.operators import OPERATORS, WIRING, changes, preceded  # noqa: E402
from mutation.revision import PARTS, changed_and_seventh  # noqa: E402

from rft.algorithm import LOSSES  # noqa: E402
from rft.train.folder import resume  # noqa: E402
from tests.conftest import SOON_S  # noqa: E402

ALL = tuple(dict.fromkeys((*OPERATORS, *WIRING)))


def added(body: str, operator: str, arguments: str = "x, batch") -> list[str]:
    """The lines that an operator makes of a function."""
    source = f"async def made_up({arguments}):\n{textwrap.indent(body, '    ')}"
    return [change.added for change in changes(source, "made_up", ALL) if change.operator == operator]


@pytest.mark.parametrize(
    ("operator", "body", "expected"),
    [
        ("sign", "return -x", ["return x"]),
        ("sign", "y = x - 3", ["y = x + 3"]),
        ("sign", "x += y", ["x -= y"]),
        ("sign", "return x, {}", ["return (-x, {})"]),
        ("sign", "return {'advantages': x}", ["return {'advantages': -x}"]),
        ("product", "return x * y", ["return x / y"]),
        ("detach", "return x.detach().exp()", ["return x.exp()"]),
        ("extremes", "return torch.maximum(x, y)", ["return torch.minimum(x, y)"]),
        ("extremes", "return min(max(x, 1), 3)", ["return max(max(x, 1), 3)", "return min(min(x, 1), 3)"]),
        ("extremes", "return x.clamp(1, 3)", ["return x.clamp(3, 1)"]),
        ("extremes", "return x.clamp(min=1)", ["return x.clamp(max=1)"]),
        ("extremes", "return x.scatter_reduce(0, y, z, 'amin')", ["return x.scatter_reduce(0, y, z, 'amax')"]),
        ("comparison", "return x < 3", ["return x >= 3"]),
        ("comparison", "return x is None", ["return x is not None"]),
        ("logic", "return ~x & y", ["return ~x | y", "return x & y"]),
        ("mask", "return torch.where(y, x, 0.0)", ["return x"]),
        ("mask", "return x.where(y, 0)", ["return x"]),
        ("mask", "return torch.where(y, x, 1.0)", ["return torch.where(y, 1.0, x)"]),
        ("mask", "return x.masked_fill(y, 0)", ["return x"]),
        ("mask", "return x * batch['loss_mask']", ["return x * (batch['loss_mask'] | True)"]),
        ("mask", "return keep.sum()", ["return (keep | True).sum()"]),
        ("constant", "return 0.5 + 0", ["return 1.0 + 0", "return 0.5 + 1"]),
        ("constant", "return x.sort(dim=1, descending=True)[0]", ["return x.sort(dim=1, descending=False)[0]"]),
        ("constant", "return x.sum(1, keepdim=True)", []),
        ("mean_sum", "return x.mean(dim=1)", ["return (x * 1.0).sum(dim=1)"]),
        ("mean_sum", "return torch.sum(x, 1)", ["return (x * 1.0).mean(1)"]),
        ("bound", "return torch.clamp(x, 0, 1).abs()", ["return torch.clamp(x, 0, 1)", "return x.abs()"]),
        ("effect", "x.close()\nawait y.stop()\nlogging.info('z')\nx.done()", ["pass", "pass", "pass"]),
        ("effect", "x.a = 1\nx['b'] = 2\ny = 3", ["pass", "pass"]),
        ("option", "return x(1, a=2, **b)", ["return x(1, **b)", "return x(1, a=2)"]),
        ("branch", "return 1 if x else 2", ["return 1 if not x else 2"]),
        ("branch", "if x.a():\n    return 1", ["if not x.a():"]),
        ("branch", "if not x:\n    return 1 if x == 2 else 3", []),
    ],
)
def test_operator(operator, body, expected):
    assert added(body, operator) == expected


def test_the_two_sides_of_a_clip_are_taken_for_each_other():
    body = "return x.clamp(1 - clip_low, 1 + clip_high)"
    found = added(body, "sides", "x, *, clip_low, clip_high")
    assert found == ["return x.clamp(1 - clip_high, 1 + clip_high)", "return x.clamp(1 - clip_low, 1 + clip_low)"]
    assert added("return x.clamp(1 - clip_low)", "sides", "x, *, clip_low") == []  # there is no other side


def test_docstrings_annotations_defaults_and_decorators_stay():
    source = '''
@register("a", 3)
def made_up(x: Literal[1, 2] = 4) -> tuple[int, 5]:
    """Returns -x."""
    y: Literal[3] = x
    return y
'''
    assert changes(source, "made_up") == []


def test_a_change_runs_in_the_place_of_the_function():
    source = "import torch\ndef made_up(x, keep):\n    return torch.where(keep, -x, 0.0).sum()"
    scope = {}
    exec(source, scope)
    function = scope["made_up"]
    x, keep = torch.tensor([1.0, 5.0]), torch.tensor([True, False])
    assert function(x, keep) == -1
    results = {}
    for change in changes(source, "made_up"):
        function.__code__ = change.code
        results[change.added] = function(x, keep).item()
        assert change.line == 3
    assert results == {
        "return (torch.where(keep, -x, 0.0) * 1.0).mean()": -0.5,
        "return (-x).sum()": -6,
        "return torch.where(keep | True, -x, 0.0).sum()": -6,
        "return torch.where(keep, x, 0.0).sum()": 1,
        "return torch.where(keep, -x, 1.0).sum()": 0,
    }


def test_a_method_is_found_in_its_class():
    source = "class A:\n    def b(self, x):\n        return x + 1\nclass C:\n    def b(self, x):\n        return x - 1"
    assert [change.added for change in changes(source, "C.b")] == ["return x + 1", "return x - 2"]


def test_the_list_of_equivalents_is_held_to_what_was_found(monkeypatch):
    first, second = changes("def made_up(x):\n    return -2 * x", "made_up")[:2]
    noticed, survived = Mutant("m.made_up", first, noticed="test_a: AssertionError"), Mutant("m.made_up", second)
    keys = [("m.made_up", first.added), ("m.made_up", second.added), ("m.made_up", "return y"), ("m.other", "return z")]
    monkeypatch.setattr(mutate, "EQUIVALENT", dict.fromkeys(keys, "because"))
    assert [outcome(mutant) for mutant in (noticed, survived)] == ["noticed", "equivalent"]
    found = untrue([noticed, survived])
    assert [sentence.rpartition(") ")[2] for sentence in found] == [
        "is noticed by test_a: AssertionError",
        "is no change",
    ]
    assert "return y" in found[1]


def test_every_registered_loss_is_reached():
    functions = reached(KINDS["loss"])
    registered = [LOSSES.function(name) for name in LOSSES.names()]
    ours = {function.__qualname__ for function in registered if function.__module__.startswith("rft.")}
    assert ours <= {name.rpartition(".")[2] for name in functions}
    assert {"divergence.log_ratio", "divergence.k3"} <= set(functions)  # what they call elsewhere


def test_every_operator_is_tried_above():
    tried = {mark.args[1][i][0] for mark in test_operator.pytestmark for i in range(len(mark.args[1]))}
    assert tried | {"sides"} == {operator.__name__ for operator in ALL}


class Connected:
    def plain(self, x):
        self.x = x
        return x

    @property
    def value(self):
        return self.x + 1

    @classmethod
    def made(cls):
        return cls()

    async def later(self):
        return self.x

    def inherits(self):
        return super().__str__()


def test_a_call_is_recorded_and_the_function_does_what_it_did():
    calls = set()
    function = Connected.plain
    code = function.__code__
    function.__globals__["_called"] = calls.add
    function.__code__ = preceded(function, "_called('here')")
    assert not calls
    assert Connected().plain(3) == 3 and calls == {"here"}
    function.__code__ = code


def test_functions_are_found_behind_their_decorators():
    module = sys.modules[__name__]
    names = [f"Connected.{name}" for name in ("plain", "value", "made", "later")]
    assert [wiring._function(module, name).__qualname__ for name in names] == names
    assert wiring._function(module, "Connected.inherits") is None  # its code reads a variable of the class
    assert {*names, "test_operator", "run"} < set(wiring._names(wiring.ast.parse(Path(__file__).read_text())))


def made_up(count: int, folder: Path) -> dict:
    """Functions of a module that this writes."""
    file = folder / "made_up.py"
    file.write_text("".join(f"def f{n}(x):\n    return x + {n + 2}, x.y(a={n})\n" for n in range(count)))
    scope = {"__name__": "made_up"}
    exec(compile(file.read_text(), file, "exec"), scope)
    return {f"{wiring.PACKAGES[n % 2]}.made_up.f{n}": scope[f"f{n}"] for n in range(count)}


def test_the_sample_of_a_function_does_not_depend_on_the_others(tmp_path):
    functions = made_up(2 * wiring.COUNT + 10, tmp_path)
    sample = dict(wiring.sample(functions))
    assert Counter(name.partition(".")[0] for name in sample) == dict.fromkeys(wiring.PACKAGES[:2], wiring.COUNT)
    assert len({change.operator for change in sample.values()}) > 1
    left_out = next(iter(sample))
    again = dict(wiring.sample({name: f for name, f in functions.items() if name != left_out}))
    assert len(again) == len(sample) and len(set(again) - set(sample)) == 1
    assert all(again[name].added == sample[name].added for name in set(again) & set(sample))


def test_a_record_names_what_a_test_notices(tmp_path, monkeypatch):
    monkeypatch.setattr(wiring, "RECORD", tmp_path / "record.json")
    assert wiring.read() == {}
    functions = made_up(6, tmp_path)
    lines = [wiring.key(*pair) for pair in wiring.sample(functions)]
    wiring.write(dict(zip(lines, ["test_a", None, "test_b", None, None, "test_c"], strict=True)))
    record = wiring.read()
    found = wiring.recorded(functions, record)
    assert {wiring.key(*pair) for pair in found} == {lines[0], lines[2], lines[5]}
    assert wiring.gone(record, found) == []
    assert wiring.gone(record, found[1:]) == [wiring.key(*found[0])]


def test_the_fastest_tests_and_some_of_every_file_are_chosen(monkeypatch):
    monkeypatch.setattr("mutate.MOST_S", 20.0)
    files = {"a": [1, 2, 3, 4.5], "b": [5], "c": [9]}
    items = [(SimpleNamespace(path=file, nodeid=f"{file}{s}"), s) for file, times in files.items() for s in times]
    tests = [mutate.Test(item, seconds, []) for item, seconds in items]
    assert [test.item.nodeid for test in chosen(tests)] == ["a1", "a2", "a3", "b5"]  # 1 + 2 + 3, and 1 + 5


def test_a_test_that_waits_for_good_has_noticed_the_change(tmp_path, monkeypatch):
    monkeypatch.setattr(mutate.Test, "limit", 0.5)
    monkeypatch.setattr(wiring, "functions", lambda: {"train.folder.resume.describe_changes": resume.describe_changes})
    monkeypatch.setattr(wiring, "RECORD", tmp_path / "record.json")
    test = tmp_path / "test_waits.py"
    test.write_text(
        "import time\n"
        "from rft.train.folder.resume import describe_changes\n"
        "def test_waits():\n"
        "    while 'other' not in describe_changes([('a', 1, 2)] * 5):\n"
        "        time.sleep(0.1)\n"
    )
    status, output = run("--kind", "wiring", "--record", "--tests", test)
    assert status == 0 and "1 of 1 changes are noticed" in output
    (noticed,) = wiring.read().values()
    assert noticed.endswith("test_waits.py::test_waits")


def test_what_processes_return_and_how_they_end(tmp_path):
    started = tmp_path / "pid"

    def endless():
        started.write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        time.sleep(1000)

    def killed():
        os.kill(os.getpid(), signal.SIGTERM)

    folders = ("PYTEST_DEBUG_TEMPROOT", "RFT_CACHE")
    works = [lambda: [3, "a"], lambda: [os.environ[name] for name in folders], killed, lambda: 1 / 0]
    first, places, *ended = forked(works, 60) + forked([endless], 3)
    assert first == [3, "a"]
    assert len({*places, *(os.environ.get(name) for name in folders)}) == 4  # no other process writes there
    assert [sentence.partition(" within ")[0] for sentence in ended] == [
        "the process ended by SIGTERM",
        "the process ended without an answer",
        "the process ended by SIGKILL",
    ]
    place, deadline = Path("/proc", started.read_text(), "stat"), time.monotonic() + SOON_S
    while place.exists() and ") Z" not in place.read_text():  # what the last one had started ends with it
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_git_shows_as_changed_is_tried_and_of_the_rest_a_seventh_each_time(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    functions = made_up(2 * PARTS, tmp_path)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "a")
    start = git("rev-parse", "HEAD")
    assert changed_and_seventh("no_revision", functions) == functions
    seen = []
    for _ in range(PARTS):
        seen.append(set(changed_and_seventh(start, functions)))
        git("commit", "-qm", "b", "--allow-empty")
        changed_and_seventh.__globals__["_git"].cache_clear()
    assert {len(names) for names in seen} == {2} and len(set.union(*seen)) == 2 * PARTS
    file = tmp_path / "made_up.py"
    file.write_text(file.read_text().replace("x + 5", "x + 50"))
    found = changed_and_seventh(start, functions)
    (changed,) = [name for name in functions if name.endswith(".f3")]
    assert set(found) == {changed} | seen[0]


def run(*arguments: object) -> tuple[int, str]:
    """The status and the output of the command, in a process forked from this one."""

    def command() -> tuple[int, str]:
        gc.freeze()  # pytest collects garbage twice; this keeps it from looking at what this session has imported
        sys.argv = ["mutate.py", *map(str, arguments)]
        with redirect_stdout(io.StringIO()) as output, pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, output.getvalue()

    (answer,) = forked([command], 60)
    return tuple(answer)


def test_what_no_test_notices_is_shown(tmp_path):
    test = tmp_path / "test_two.py"
    test.write_text(
        "import torch\n"
        "from rft.algorithm.divergence import k2, k3\n"
        "def test_of_little():\n"
        "    assert k2(torch.tensor(0.0)) == 0\n"
        "def test_that_fails():\n"
        "    assert k2(torch.tensor(2.0)) == 1\n"
        "def test_of_another_function():\n"
        "    assert k3(torch.tensor(0.0)) == 0\n"
    )
    status, output = run("--only", "k2", "--tests", test)
    assert status == 1
    assert "- return 0.5 * d.square()\n+ return 1.0 * d.square()" in output  # 0.5 / d.square() is not survived
    assert "fails by itself: " in output and "test_two.py::test_that_fails" in output
    assert "1 of 2 changes are noticed: 50.0% (0 of them by an error" in output


def test_everything_noticed_is_a_success(tmp_path):
    test = tmp_path / "test_one.py"
    test.write_text(
        "import torch\nfrom rft.algorithm.divergence import k2\ndef test():\n    assert k2(torch.tensor(2.0)) == 2\n"
    )
    status, output = run("--only", "k2", "--tests", test, "-j", 2)
    assert status == 0, output
    assert "2 of 2 changes are noticed: 100.0%" in output


@pytest.mark.slow
def test_what_a_test_has_noticed_of_the_wiring_must_be_noticed_again(tmp_path, monkeypatch):
    functions = {f"train.folder.resume.{name}": vars(resume)[name] for name in ("describe_changes", "overrides")}
    monkeypatch.setattr(wiring, "functions", lambda: functions)
    monkeypatch.setattr(wiring, "RECORD", tmp_path / "record.json")
    test = tmp_path / "test_two.py"
    text = (
        "from rft.train.folder.resume import describe_changes, overrides\n"
        "def test_describe():\n"
        "    assert describe_changes([('a', 1, 2)] * 100).startswith('a (1 there, 2 here), a')\n"
        "def test_describe_more():\n"
        "    assert 'other' in describe_changes([('a', 1, 2)] * 5) and describe_changes([]) == ''\n"
        "def test_overrides():\n"
        "    assert overrides([('a', 1, 2), ('b', 3, 4)]) == 'a=1 b=3' and overrides([('a', 1, 2)] * 100) == ''\n"
    )
    test.write_text(text)
    options = ("--kind", "wiring", "--tests", test)
    status, output = run(*options, "--record")
    assert status == 0 and "2 of 2 changes" in output
    ids = [name.rpartition("::")[2] for name in wiring.read().values()]
    assert sorted(ids) == ["test_describe_more", "test_overrides"]
    assert run(*options)[0] == 0
    test.write_text(text.replace("test_describe_more", "test_of_another_name"))
    assert run(*options)[0] == 0
    test.write_text(text.replace("'other' in", "'' in"))
    status, output = run(*options)
    assert (
        status == 1
        and "1 of 2 changes are noticed" in output
        and "train.folder.resume.describe_changes, line" in output
    )
    monkeypatch.setattr(wiring, "functions", lambda: {"train.folder.resume.overrides": resume.overrides})
    status, output = run(*options)
    assert status == 1 and "names 1 changes of lines that the code has no more" in output
    status, output = run(*options, "--record")
    assert status == 0 and [name.rpartition("::")[2] for name in wiring.read().values()] == ["test_overrides"]
