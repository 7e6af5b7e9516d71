"""The optimizer state in host memory between steps: the same numbers, moved once a step, and nothing left behind."""

import weakref

import pytest
import torch
from torch import Tensor

from rft.distributed import start
from rft.strategy.gather import to_local
from tests.helpers import MODEL, OPTIMIZER, make_actor, make_batch, make_optimizer, make_strategy, update

NAMES = ("adamw", "adamw_8bit", "muon")


def make(name="adamw", device="cpu", **options):
    torch.set_num_threads(1)
    world, optimizer = start(device), make_optimizer(**OPTIMIZER | {"name": name})
    actor = make_actor(world, make_strategy(world, **options), optimizer, model_config=MODEL)
    actor.begin_training(optimizer, 10)
    return actor


def moved(actor):
    """The tensors of the optimizer state that are not scalars, by parameter and name."""
    state = actor.train_state.optimizer.state
    return {
        (number, name): to_local(tensor)
        for number, parts in enumerate(state.values())
        for name, tensor in parts.items()
        if isinstance(tensor, Tensor) and tensor.dim()
    }


def same_updates(one, other, count):
    for _ in range(count):
        assert update(other, make_batch()) == update(one, make_batch())
    for (name, expected), (_, found) in zip(one.weights(), other.weights(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize("name", NAMES)
def test_the_updates_are_the_same_bit_for_bit(name):
    same_updates(make(name), make(name, optimizer_offload=True), 3)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_on_the_device_during_the_step_alone(name):
    actor, during = make(name, optimizer_offload=True), []
    optimizer = actor.train_state.optimizer
    update(actor, make_batch())
    host = {key: tensor.data_ptr() for key, tensor in moved(actor).items()}
    assert len(host) > len(optimizer.state)
    optimizer.register_step_pre_hook(lambda *_: during.append({k: weakref.ref(t) for k, t in moved(actor).items()}))
    optimizer.register_step_pre_hook(
        lambda *_: during.append({key: tensor.data_ptr() for key, tensor in moved(actor).items()})
    )
    update(actor, make_batch())
    references, addresses = during
    assert addresses.keys() == host.keys() and not set(addresses.values()) & set(host.values())
    assert all(reference() is None for reference in references.values()), "the copies on the device are freed"
    assert {key: tensor.data_ptr() for key, tensor in moved(actor).items()} == host, "host memory is allocated once"


def test_the_host_holds_two_moments_of_every_weight():
    actor = make(optimizer_offload=True)
    update(actor, make_batch())
    assert sum(tensor.nbytes for tensor in moved(actor).values()) == 8 * sum(
        p.numel() for p in actor.network.parameters()
    )


@pytest.mark.parametrize("offload", [True, False])
def test_a_state_goes_on_with_the_option_and_without(offload):
    one = make()
    update(one, make_batch())
    before = make(optimizer_offload=not offload)
    update(before, make_batch())
    after = make(optimizer_offload=offload)
    after.load_state_dict(before.state_dict())
    loaded = {key: tensor.data_ptr() for key, tensor in moved(after).items()}
    same_updates(one, after, 2)
    assert (loaded == {key: tensor.data_ptr() for key, tensor in moved(after).items()}) or not offload


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_the_state_is_pinned_and_the_updates_are_the_same(name):
    other = make(name, "cuda", optimizer_offload=True)
    same_updates(make(name, "cuda"), other, 3)
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in moved(other).values())
    assert all(
        tensor.device.type == "cpu"
        for state in other.train_state.optimizer.state.values()
        for tensor in state.values()
        if tensor.dim()
    )
