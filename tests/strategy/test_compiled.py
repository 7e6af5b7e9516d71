"""Compiled functions: any size has the same graph, and there is room for many other graphs."""

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from rft.strategy.compiled import compile_function


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Without code generation, which takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_other_sizes_have_the_same_graph():
    double = compile_function(lambda states: states * 2)
    for size in (5, 3, 64, 1000):
        assert double(torch.ones(size, 7)).sum() == 14 * size
    assert counters["stats"]["unique_graphs"] == 1


def test_more_kinds_than_the_limit_of_torch_are_compiled():
    count = compile_function(lambda states, name: states + len(name))
    for kind in range(20):
        count(torch.ones(3), "x" * kind)
    assert counters["stats"]["unique_graphs"] == 20
