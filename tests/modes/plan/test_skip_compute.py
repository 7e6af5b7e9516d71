"""Placeholders: shapes and storages of real tensors, no numbers, no memory touched."""

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp  # registers its operations
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from rft.modes.plan.skip_compute import SkipCompute

STATM = Path("/proc/self/statm")
OFFSETS = torch.tensor([1, 3, 4], dtype=torch.int32)  # of three groups in four rows
MASK = torch.tensor([True, False, True, True])


@pytest.fixture
def placeholder():
    """A tensor of these sizes, and the mode that knows of it."""
    mode = SkipCompute()

    def make(*sizes, **options):
        with mode, mode.creating():
            return torch.empty(*sizes, **options)

    make.mode = mode
    return make


def is_placeholder(mode, tensor):
    """A real tensor returns the number that was written; a placeholder always returns 1."""
    with mode:
        return tensor.clone().fill_(7).flatten()[0].item() == 1


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x @ x.T,
        lambda x: x.bfloat16(),
        lambda x: x.T,
        lambda x: x[1:, ::2],
        lambda x: x[MASK],
        lambda x: x[torch.tensor([3, 0])],
        lambda x: torch.cat((x, x), 1),
        lambda x: x.max(-1),
        lambda x: x.split(3, dim=1),
        lambda x: x.reshape(-1),
        lambda x: x.T.reshape(-1),
        lambda x: torch.einsum("ab,cb->ac", x, x),
        lambda x: x.unflatten(1, (2, 3))[None].expand(2, -1, -1, -1),
        lambda x: scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True),
        lambda x: torch.zeros(4, 6).masked_scatter(torch.ones(4, 6, dtype=torch.bool), x),
        lambda x: x.float().logsumexp(-1),
        lambda x: torch.mm(x, x.T, out=torch.empty(4, 4)),
        lambda x: x.isfinite().all(),
        lambda x: x.topk(2).indices,
        lambda x: torch._grouped_mm(x[:, :4].contiguous(), torch.ones(3, 4, 8), offs=OFFSETS),
        lambda x: torch._grouped_mm(torch.ones(8, 4), x[:, :4].contiguous(), offs=OFFSETS),
    ],
)
def test_results_have_the_shapes_of_real_ones(operation, placeholder):
    def described(results):
        results = results if isinstance(results, tuple | list) else [results]
        return [(r.shape, r.dtype, r.stride(), r.storage_offset(), r.untyped_storage().nbytes()) for r in results]

    real = operation(torch.randn(4, 6))
    tensor = placeholder(4, 6)
    with placeholder.mode:
        first, again = operation(tensor), operation(tensor)  # the second is made from memory
    assert described(first) == described(again) == described(real)
    parts = first if isinstance(first, tuple | list) else [first]
    assert all(is_placeholder(placeholder.mode, part) for part in parts)


def test_gradients_flow_through_a_placeholder_module_and_its_optimizer(placeholder):
    with placeholder.mode:
        with placeholder.mode.creating():
            module = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        module(torch.tensor([[1, 2, 3]])).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        assert torch.isfinite(norm)
        optimizer.step()
    for parameter in module.parameters():
        assert parameter.grad.shape == parameter.shape and is_placeholder(placeholder.mode, parameter.grad)
        assert is_placeholder(placeholder.mode, optimizer.state[parameter]["exp_avg"])


def test_what_does_not_touch_a_placeholder_is_real(placeholder):
    placeholder(3)
    with placeholder.mode:
        assert torch.arange(4).sum().item() == 6
        assert torch.ones(3).cumsum(0).tolist() == [1.0, 2.0, 3.0]


def test_while_creating_only_floating_point_is_placeholder(placeholder):
    with placeholder.mode, placeholder.mode.creating():
        counted, weights = torch.arange(4), torch.zeros(3)
        placed = torch.zeros(3, device="meta")
    assert counted.tolist() == [0, 1, 2, 3] and placed.is_meta
    assert is_placeholder(placeholder.mode, weights)
    with placeholder.mode:
        assert not is_placeholder(placeholder.mode, torch.zeros(3))


def test_numbers_of_a_placeholder_are_one_and_masks_are_full(placeholder):
    tensor = placeholder(2048, 2048)
    with placeholder.mode:
        assert tensor.sum().item() == 1
        assert (tensor > 5).any() and torch.allclose(tensor, tensor + 1)
        assert tensor[tensor > 5].shape == (2**22,)
        assert (tensor > 5).nonzero().shape == (2**22, 2)
        assert torch.bincount(tensor[0, :7].long(), minlength=3).tolist() == [2, 2, 3]


def test_a_result_that_shares_memory_with_what_was_given_still_does(placeholder):
    """FSDP gathers so: its schema does not say what is written, nor what is a view of what."""
    gathered, shard = torch.zeros(8), placeholder(2)
    with placeholder.mode:
        part, whole = torch.ops.fsdp.all_gather_copy_in([shard], gathered, [2], 2, 1)
    assert whole.data_ptr() == gathered.data_ptr() and whole.shape == (8,)
    assert part.data_ptr() == gathered[2:].data_ptr() and part.shape == (2,)
    assert is_placeholder(placeholder.mode, gathered)


def test_what_a_placeholder_is_written_into_is_placeholder_until_it_is_filled(placeholder):
    column = torch.arange(6.0)
    with placeholder.mode:
        column[2:4] = placeholder(2)
        assert is_placeholder(placeholder.mode, column)
    placeholder.mode.materialize([column])
    assert not is_placeholder(placeholder.mode, column)
    assert column.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.skipif(not STATM.exists(), reason="the resident memory is read from /proc")
def test_no_memory_is_touched(placeholder):
    def resident():
        return int(STATM.read_text().split()[1]) * resource.getpagesize()

    before = resident()
    with placeholder.mode:
        tensor = placeholder(16384, 16384)  # 1 GiB
        product = (tensor @ tensor).softmax(-1)
        tensor.normal_().mul_(2)
    assert product.untyped_storage().nbytes() == 2**30
    assert resident() - before < 2**26
