"""Float16: a loss scale that finds its place, skips what overflows and is part of a checkpoint. The norm of gradients
on several meshes is that of torch on one.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from rft.actor.base import NonFiniteError
from rft.distributed import start
from rft.strategy.gradients import LossScale
from rft.strategy.parallel.groups import clip_grad_norm
from tests.helpers import (
    LENGTHS,
    MODEL,
    OPTIMIZER,
    close,
    job,
    make_actor,
    make_batch,
    make_optimizer,
    make_strategy,
    update,
)


@pytest.fixture
def make():
    """Makes an actor that trains in float16."""
    torch.set_num_threads(1)

    def build():
        world, optimizer = start("cpu"), make_optimizer(**OPTIMIZER)
        actor = make_actor(world, make_strategy(world, dtype="float16"), optimizer, model_config=MODEL)
        actor.begin_training(optimizer, 10)
        return actor

    return build


@pytest.fixture
def actor(make):
    return make()


def snapshot(actor):
    return {name: tensor.clone() for name, tensor in actor.weights()}


def test_it_halves_where_an_update_overflows_and_doubles_after_2000_that_do_not():
    scale = LossScale(factor=8.0, moves=True)
    for _ in range(1999):
        scale.advance()
    assert scale.retreat() and scale == LossScale(4.0, True, 0)
    for _ in range(1999):
        scale.advance()
    assert scale.factor == 4.0
    scale.advance()
    assert scale == LossScale(8.0, True, 0)


def test_below_one_it_does_not_go():
    scale = LossScale(factor=2.0, moves=True)
    assert scale.retreat() and not scale.retreat()
    assert scale.factor == 1.0


def test_other_dtypes_need_none():
    strategy = make_strategy(start("cpu"), dtype="bfloat16")
    scale = strategy.loss_scale()
    for _ in range(2000):
        scale.advance()
    assert scale.factor == 1.0 and not scale.retreat()


def test_an_overflow_skips_the_update_and_the_next_one_is_that_of_a_smaller_scale(actor):
    batch, before = make_batch(), snapshot(actor)
    actor.train_state.scale.factor = 2.0**40
    numbers = update(actor, batch)
    assert numbers["loss_scale"] == 2.0**40 and actor.train_state.scale.factor == 2.0**39
    assert "grad_norm" not in numbers and "lr" not in numbers
    assert not actor.train_state.optimizer.state and actor.train_state.scheduler.last_epoch == 0
    close(snapshot(actor), before, 0.0)

    actor.train_state.scale.factor = 2.0**8
    numbers = update(actor, batch)
    assert (
        math.isfinite(numbers["grad_norm"])
        and actor.train_state.scale.calm == 1
        and actor.train_state.scheduler.last_epoch == 1
    )
    assert any(not torch.equal(tensor, before[name]) for name, tensor in actor.weights())


def test_the_scale_is_not_in_the_gradient(perform, actor):
    """Its norm is that of float32 but for rounding, whatever the scale is."""
    exact = perform(job(cap=10**6))["numbers"][0]["grad_norm"]
    norms = []
    for factor in (2.0**2, 2.0**9):
        actor.train_state.scale.factor = factor
        for group in actor.train_state.optimizer.param_groups:
            group["lr"] = 0.0  # the weights stay
        norms.append(update(actor, make_batch())["grad_norm"])
    assert norms == pytest.approx([exact, exact], rel=2e-2)
    assert norms[0] != exact


def test_a_gradient_that_overflows_without_a_scale_is_a_divergence(actor):
    batch = make_batch()
    batch["advantages"] *= 1e7
    actor.train_state.scale.factor = 1.0
    with pytest.raises(NonFiniteError):
        update(actor, batch)


def test_a_loss_that_is_not_finite_is_a_divergence_whatever_the_scale(actor):
    batch = make_batch()
    batch["advantages"][2, LENGTHS[2] - 1] = math.nan
    with pytest.raises(NonFiniteError) as caught:
        update(actor, batch)
    assert caught.value.suspects == {"advantages": [2]}
    assert actor.train_state.scale.factor == 2.0**16


def test_after_a_row_that_is_not_finite_the_update_without_it_is_that_of_another_run(make):
    bad = make_batch()
    bad["advantages"][2, LENGTHS[2] - 1] = math.nan
    actor, other = make(), make()
    with pytest.raises(NonFiniteError):
        update(actor, bad)
    others = make_batch()[torch.arange(8) != 2]
    assert update(actor, others) == update(other, others)
    close(snapshot(actor), snapshot(other), 0.0)
    assert actor.train_state.scale == other.train_state.scale == LossScale(2.0**16, True, 1)


def test_a_checkpoint_holds_the_scale(actor):
    state = copy.deepcopy(actor.state_dict()) | {"scale": {"factor": 4.0, "moves": True, "calm": 7}}
    actor.load_state_dict({key: state[key] for key in ("network", "as_loaded")})
    assert actor.train_state.scale.factor == 2.0**16
    actor.load_state_dict(state)
    assert actor.train_state.scale == LossScale(4.0, True, 7)
    assert actor.state_dict()["scale"] == state["scale"]


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
