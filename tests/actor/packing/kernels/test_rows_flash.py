"""FlashAttention 2 and 3: their calls by references with the signatures of the packages."""

import pytest
import torch

from rft.actor.packing.kernels.base import AttentionRule
from rft.actor.packing.kernels.rows import FlashKernel
from rft.actor.packing.kernels.sdpa import SdpaKernel
from rft.actor.packing.layout import PackedSegment
from tests.actor.packing.kernels.models import CASES, check_model
from tests.actor.packing.kernels.references import PACKAGES, install_package

SEGMENTS = (PackedSegment(1, 2), PackedSegment(3, 2, prefix=0), PackedSegment(1, 5, prefix=0), PackedSegment(2, 7))


@pytest.fixture(params=PACKAGES)
def kernel(request, monkeypatch):
    install_package(request.param, monkeypatch)
    made = FlashKernel()
    assert made.third != (request.param == "flash_attn")
    return made


@CASES
def test_a_model_has_the_states_and_gradients_of_each_row_alone(kernel, name, shares):
    check_model(name, shares, kernel)


@pytest.mark.parametrize("window", [None, 3])
def test_soft_caps_and_sinks_at_once(kernel, window):
    generator = torch.Generator().manual_seed(3)
    sizes = (1, 4, 27, 8), (1, 2, 27, 8), (1, 2, 27, 8), (4,)
    results = []
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    for one in (kernel, SdpaKernel()):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        query, key, value, sinks = leaves
        out = one.attend(query, key, value, SEGMENTS, AttentionRule(0.7, window, 2.0, sinks))
        slopes = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
        results.append([out, *torch.autograd.grad((out * slopes).sum(), leaves)])
    for mine, expected in zip(*results, strict=True):
        assert (mine - expected).abs().max() < 1e-12
