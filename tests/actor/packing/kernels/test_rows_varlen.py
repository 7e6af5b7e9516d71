"""Torch's attention over rows: its calls by a reference of the same signature, and by the shapes of the real one."""

import pytest
import torch

from rft.actor.packing.kernels.base import AttentionRule
from rft.actor.packing.kernels.rows import VarlenKernel
from rft.actor.packing.layout import PackedSegment
from rft.strategy.blocks import recompute
from tests.actor.packing.kernels.models import CASES, check_model
from tests.actor.packing.kernels.references import aten_backward, aten_forward

SEGMENTS = (PackedSegment(2, 3), PackedSegment(1, 2), PackedSegment(2, 4, prefix=1))


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)


@CASES
def test_a_model_has_the_states_and_gradients_of_each_row_alone(reference, name, shares):
    if "capped" in name:
        pytest.skip("refused: see test_rows")
    check_model(name, shares, VarlenKernel())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("heads", [(4, 2, 8, 8), (2, 2, 12, 5)])
def test_the_real_operation_takes_the_calls(window, heads):
    """On the meta device, which knows shapes alone."""
    count, key_count, width, value_width = heads
    tokens = sum(segment.rows * segment.length for segment in SEGMENTS)
    shapes = (count, width), (key_count, width), (key_count, value_width)
    leaves = [
        torch.empty(1, number, tokens, size, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for number, size in shapes
    ]
    sinks = torch.empty(count, device="meta", requires_grad=True)
    out = VarlenKernel().attend(*leaves, SEGMENTS, AttentionRule(None, window, None, sinks))
    assert out.shape == (1, tokens, count, value_width) and out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.sum(), [*leaves, sinks])
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in [*leaves, sinks]]


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_blocks_have_the_same_gradients(reference, kind):
    class Block(torch.nn.Module):
        def forward(self, states):
            rule = AttentionRule(None, None, None, None)
            return VarlenKernel().attend(states, states[:, :2], states[:, :2], SEGMENTS, rule)

    states = torch.randn(1, 4, 16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for recomputes in (False, True):
        block, leaf = Block(), states.clone().requires_grad_()
        if recomputes:
            recompute(block, kind)
        results.append(torch.autograd.grad(block(leaf).square().sum(), leaf)[0])
    assert torch.equal(*results)
