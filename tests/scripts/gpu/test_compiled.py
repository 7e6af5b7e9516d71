"""The checks of compiled code, at small sizes on a CPU."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from gpu import compiled
from gpu.checks import FailedError, Setting


@pytest.fixture
def setting(tmp_path, monkeypatch):
    """Graphs are traced and counted, and no code is generated, which takes long: tests/strategy does it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    yield Setting(tmp_path, cpu=True)
    torch._dynamo.reset()


@pytest.mark.slow
def test_blocks_are_compiled_once(setting):
    numbers = compiled.blocks(setting).numbers
    assert (numbers["graphs"], numbers["graphs_again"]) == (1, 0)


@pytest.mark.slow
def test_log_probabilities_are_compiled_once(setting, monkeypatch):
    monkeypatch.setattr(compiled, "SIZES", {True: (64, 5000, 32)})
    numbers = compiled.logprobs(setting).numbers
    assert 0 < numbers["graphs"] <= 4 and numbers["graphs_again"] == 0
    monkeypatch.setattr(compiled, "ERROR", {True: -1.0})
    with pytest.raises(FailedError, match="difference"):
        compiled.logprobs(setting)
