"""The norm of gradients on several meshes is that of torch on one."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rft.distributed import start
from rft.strategy.gradients import clip_grad_norm


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipped_gradients_are_those_of_torch(max_norm):
    world = start("cpu")
    sizes = {(3, 4): Shard(0), (5,): Replicate(), (2, 2): Shard(1)}
    sharded, plain = [], []
    for shape, placement in sizes.items():
        tensor = torch.randn(shape)
        sharded.append(nn.Parameter(DTensor.from_local(tensor, world.mesh, [placement])))
        plain.append(nn.Parameter(tensor.clone()))
        plain[-1].grad = torch.randn(shape)
        sharded[-1].grad = DTensor.from_local(plain[-1].grad.clone(), world.mesh, [placement])
    unused = nn.Parameter(torch.zeros(2))
    found = clip_grad_norm([*sharded, unused], max_norm, world)
    torch.testing.assert_close(found, nn.utils.clip_grad_norm_(plain, max_norm))
    for shard, whole in zip(sharded, plain, strict=True):
        torch.testing.assert_close(shard.grad.full_tensor(), whole.grad)
