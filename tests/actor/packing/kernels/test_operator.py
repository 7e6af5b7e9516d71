"""The operator of packed attention: what torch asks of an operator, and the results and gradients of its kernel."""

import pytest
import torch
import torch._inductor.lowering  # reads all of torch.ops.aten, before a test puts references there

from rft.actor.packing.kernels import operator
from rft.actor.packing.kernels.base import AttentionRule
from rft.actor.packing.kernels.rows import VarlenKernel
from rft.actor.packing.kernels.sdpa import SdpaKernel
from rft.actor.packing.layout import PackedSegment, segment_table
from tests.actor.packing.kernels.references import aten_backward, aten_forward

SEGMENTS = (PackedSegment(2, 3), PackedSegment(1, 2), PackedSegment(2, 4, prefix=1))  # 16 tokens
CASES = {
    "plain": (AttentionRule(None, None, None, None), (2, 2, 8, 8)),
    "shared heads of keys, values of another width": (AttentionRule(0.3, None, None, None), (4, 2, 12, 5)),
    "window": (AttentionRule(None, 3, None, None), (4, 1, 8, 8)),
    "sinks and window": (AttentionRule(None, 3, None, torch.tensor([0.5, -1.0])), (2, 2, 8, 8)),
    "cap": (AttentionRule(None, None, 2.0, None), (2, 2, 8, 8)),
}


@pytest.fixture(params=[SdpaKernel, VarlenKernel])
def kernel(request, monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)
    made = request.param()
    operator.register(made)
    return made


@pytest.fixture(params=CASES)
def case(request, kernel):
    rule, (heads, key_heads, width, value_width) = CASES[request.param]
    if rule.softcap is not None and isinstance(kernel, VarlenKernel):
        pytest.skip("refused: see test_rows")
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 16, heads, width), (1, 16, key_heads, width), (1, 16, key_heads, value_width)
    states = [torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes]
    sinks = None if rule.sinks is None else rule.sinks.clone().requires_grad_()
    return states, sinks, AttentionRule(rule.scaling, rule.window, rule.softcap, sinks)


def test_results_and_gradients_are_those_of_the_kernel(kernel, case):
    states, sinks, rule = case
    leaves = states if sinks is None else [*states, sinks]
    found = operator.attend_opaque(kernel, *states, segment_table(SEGMENTS), rule)
    expected = kernel.attend(*states, SEGMENTS, rule)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_torch_may_compile_it(kernel, case):
    """Its schema, its fake tensors, its gradient, and the three together with sizes that vary."""
    states, sinks, rule = case
    how = (kernel.implementation, rule.scaling, rule.window, rule.softcap)
    torch.library.opcheck(operator._attend, (*states, sinks, segment_table(SEGMENTS), *how))
