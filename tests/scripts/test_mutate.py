"""The mutation check: each operator on a made-up function, and the loop around one."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import mutate  # noqa: E402
from mutate import KINDS, Mutant, outcome, reached, untrue  # noqa: E402
from mutation.operators import OPERATORS, changes  # noqa: E402

from rft.algorithm import LOSSES  # noqa: E402


def added(body: str, operator: str, arguments: str = "x, batch") -> list[str]:
    """The lines that an operator makes of a function."""
    source = f"def made_up({arguments}):\n{textwrap.indent(body, '    ')}"
    return [change.added for change in changes(source, "made_up") if change.operator == operator]


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
    found = untrue([noticed, survived], complete=True)
    assert [sentence.rpartition(") ")[2] for sentence in found] == [
        "is noticed by test_a: AssertionError",
        "is no change",
    ]
    assert "return y" in found[1]
    assert len(untrue([noticed, survived], complete=False)) == 1


def test_every_registered_loss_is_reached():
    functions = reached(KINDS["loss"])
    registered = [LOSSES.function(name) for name in LOSSES.names()]
    ours = {function.__qualname__ for function in registered if function.__module__.startswith("rft.")}
    assert ours <= {name.rpartition(".")[2] for name in functions}
    assert {"ratio.log_ratio", "kl.k3"} <= set(functions)  # what they call elsewhere


def test_every_operator_is_tried_above():
    tried = {mark.args[1][i][0] for mark in test_operator.pytestmark for i in range(len(mark.args[1]))}
    assert tried | {"sides"} == {operator.__name__ for operator in OPERATORS}


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPTS / "mutate.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(SCRIPTS.parent)})


@pytest.mark.slow
def test_what_no_test_notices_is_shown(tmp_path):
    test = tmp_path / "test_two.py"
    test.write_text(
        "import torch\n"
        "from rft.algorithm.kl import k2, k3\n"
        "def test_of_little():\n"
        "    assert k2(torch.tensor(0.0)) == 0\n"
        "def test_that_fails():\n"
        "    assert k2(torch.tensor(2.0)) == 1\n"
        "def test_of_another_function():\n"
        "    assert k3(torch.tensor(0.0)) == 0\n"
    )
    done = run("--only", "k2", "--tests", test)
    assert done.returncode == 1, done.stderr
    assert "- return 0.5 * d.square()\n+ return 1.0 * d.square()" in done.stdout  # 0.5 / d.square() is not survived
    assert "fail by themselves: " in done.stdout and "test_two.py::test_that_fails" in done.stdout
    assert "1 of 2 changes are noticed: 50.0% (0 of them by an error" in done.stdout


@pytest.mark.slow
def test_everything_noticed_is_a_success(tmp_path):
    test = tmp_path / "test_one.py"
    test.write_text(
        "import torch\nfrom rft.algorithm.kl import k2\ndef test():\n    assert k2(torch.tensor(2.0)) == 2\n"
    )
    done = run("--only", "k2", "--tests", test)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 changes are noticed: 100.0%" in done.stdout
