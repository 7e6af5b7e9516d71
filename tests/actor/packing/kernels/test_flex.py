"""Flex attention: torch's own on the CPU for results, and by a reference of its signature for gradients."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from rft.actor.packing.kernels import flex
from rft.actor.packing.kernels.flex import FlexKernel, rows_mask
from rft.actor.packing.layout import PackedSegment
from tests.actor.packing.kernels.models import CASES, check_model


def dense(query, key, value, *, score_mod, block_mask, scale, enable_gqa, return_lse):
    """flex_attention with all products written down."""
    copies = query.shape[1] // key.shape[1]
    assert enable_gqa == (copies > 1) and return_lse
    products = query @ key.repeat_interleave(copies, 1).mT * (query.shape[3] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        products = score_mod(products, None, None, None, None)
    tokens = query.shape[2]
    seen = create_mask(block_mask.mask_mod, None, None, tokens, tokens, device="cpu")
    products = products.masked_fill(~seen, -torch.inf)
    return products.softmax(-1) @ value.repeat_interleave(copies, 1), products.logsumexp(-1)


@CASES
def test_a_model_has_the_states_of_each_row_alone(name, shares):
    """A float32 softmax of torch's flex attention: exact to 1e-5."""
    check_model(name, shares, FlexKernel(), gradients=False)


@CASES
def test_a_model_has_the_gradients_of_each_row_alone(monkeypatch, name, shares):
    monkeypatch.setattr(flex, "_function", lambda device: dense)
    check_model(name, shares, FlexKernel())


def test_who_sees_whom():
    segments = (PackedSegment(2, 1), PackedSegment(1, 2), PackedSegment(2, 2, prefix=1))
    for window, last in ((None, [0, 0, 1, 1, 0, 0, 1, 1]), (3, [0, 0, 0, 1, 0, 0, 1, 1])):
        mask = rows_mask(segments, window, torch.device("cpu"))
        seen = create_mask(mask.mask_mod, None, None, 8, 8, device="cpu")[0, 0].long().tolist()
        assert seen == [
            [1, 0, 0, 0, 0, 0, 0, 0],
            [0, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 1, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 0, 0, 0, 0],
            [0, 0, 1, 1, 1, 0, 0, 0],
            [0, 0, last[2], 1, 1, 1, 0, 0],
            [0, 0, 1, 1, 0, 0, 1, 0],
            last,
        ]


def test_layers_share_the_mask_and_the_bound():
    segments, device = (PackedSegment(2, 3),), torch.device("cpu")
    assert rows_mask(segments, 2, device) is rows_mask(segments, 2, device)
    assert flex._capped(50.0) is flex._capped(50.0), "another function would be compiled again"


def test_a_compiled_function_is_called_where_compilation_is_disabled():
    """`packed_attention` is not compiled, and the kernel inside it is."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    inner = torch.compile(lambda number: number * 2, backend=backend)
    outer = torch.compiler.disable(lambda number: inner(number) + 1)
    assert outer(torch.tensor(3.0)) == 7 and len(graphs) == 1
    pytest.importorskip("torch._dynamo").reset()
