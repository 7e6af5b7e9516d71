"""Whole tensors from sharded ones; tests/rollout/test_sampler_on_ranks.py has several ranks."""

import pytest
import torch
from torch.distributed.tensor import distribute_tensor

from rft.distributed import start
from rft.strategy.gather import WHOLE, GatherOptions, gather, to_local

HALF = GatherOptions(torch.bfloat16, rank_zero_only=True)


@pytest.fixture
def shard():
    """A sharded tensor of given numbers."""
    return lambda tensor: distribute_tensor(tensor, start("cpu").mesh)


def test_on_one_rank_a_tensor_shares_its_storage_unless_it_is_rounded(shard):
    sharded = shard(torch.tensor([1.0, 1.001]))
    assert gather(sharded, WHOLE).data_ptr() == sharded.to_local().data_ptr()
    assert gather(sharded, GatherOptions(torch.float32)).data_ptr() == sharded.to_local().data_ptr()
    rounded = gather(sharded, HALF)
    assert rounded.dtype == torch.bfloat16 and rounded.tolist() == [1.0, 1.0]
    assert sharded.to_local().tolist() == pytest.approx([1.0, 1.001])


def test_the_part_of_this_rank_shares_its_storage(shard):
    whole = torch.tensor([1.0, 2.0])
    part = to_local(sharded := shard(whole))
    assert type(part) is torch.Tensor and part.data_ptr() == sharded.to_local().data_ptr()
    assert to_local(whole) is whole


@pytest.mark.parametrize("tensor", [torch.tensor([2**20 + 1]), torch.tensor([1.5], dtype=torch.bfloat16)])
def test_integers_and_narrow_numbers_stay_as_they_are(tensor, shard):
    assert torch.equal(gather(shard(tensor), GatherOptions(torch.float32)), tensor)
    assert torch.equal(gather(shard(tensor), HALF), tensor)
