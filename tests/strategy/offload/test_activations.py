"""Activations in host memory: the same numbers, counted bytes on the host and fewer on the device."""

import pytest
import torch
from torch import nn

from rft.distributed import start
from rft.modes.plan.memory_tracker import MemoryTracker, device_bytes
from rft.strategy.fsdp2 import FSDP2
from rft.strategy.offload.activations import ActivationOffload, BlockActivations
from tests.helpers import LENGTHS, MODEL, OPTIMIZER, make_actor, make_batch, make_optimizer, make_strategy, update

BLOCKS, WIDTH = 6, 64
WIDE = MODEL | {"hidden_size": WIDTH, "intermediate_size": 256, "num_hidden_layers": BLOCKS, "head_dim": 16}
HOST = "activations (CPU)"
CPU = torch.device("cpu")
INPUTS = 4 * sum(LENGTHS) * WIDTH  # bytes of the input of one block
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def make(head="lm", device="cpu", **options):
    torch.set_num_threads(1)
    world, optimizer = start(device), make_optimizer(**OPTIMIZER)
    key = {"lm": "actor", "value": "critic"}[head]
    actor = make_actor(world, make_strategy(world, **options), optimizer, key=key, head=head, model_config=WIDE)
    actor.begin_training(optimizer, 10)
    return actor


def same_updates(one, other):
    for _ in range(2):
        assert update(other, make_batch()) == update(one, make_batch())
    for (name, expected), (_, found) in zip(one.weights(), other.weights(), strict=True):
        assert torch.equal(found, expected), name


@pytest.fixture(scope="module")
def peaks():
    """Bytes by term, with and without the option: at the peak of an update, and after it."""

    def measure(**options):
        actor, tracker = make(**options), MemoryTracker(FSDP2.memory_labels)
        update(actor, make_batch())
        with tracker.watch():
            with tracker.stage("update"):
                update(actor, make_batch())
            with tracker.stage("after"):
                pass
        return tracker.peaks()

    return {
        (kind, offload): measure(activation_checkpointing=kind, activation_offload=offload)
        for kind in ("none", "full")
        for offload in (False, True)
    }


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("kind", ["none", "full"])
def test_the_updates_are_the_same_bit_for_bit(kind, head):
    same_updates(
        make(head, activation_checkpointing=kind), make(head, activation_checkpointing=kind, activation_offload=True)
    )


@on_a_gpu
def test_the_updates_are_the_same_on_a_gpu():
    same_updates(make(device="cuda"), make(device="cuda", activation_offload=True))


def test_with_recomputation_the_host_holds_the_inputs_of_the_blocks(peaks):
    assert peaks["full", True]["update"][HOST] == BLOCKS * INPUTS
    assert HOST not in peaks["full", False]["update"]


def test_the_device_holds_two_blocks(peaks):
    whole, offloaded = peaks["none", False]["update"], peaks["none", True]["update"]
    outside = device_bytes(peaks["full", True]["update"])  # what the blocks need in their own backward, and the head
    assert device_bytes(offloaded) - outside < 0.45 * (device_bytes(whole) - outside)
    assert 0.85 < offloaded[HOST] / whole["activations"] < 1.15  # at the peak without it, some are freed already


def test_after_the_update_the_host_holds_nothing(peaks):
    for kind in ("none", "full"):
        assert peaks[kind, True]["after"].get(HOST, 0) == 0


class Block(nn.Module):
    """Uses its input three times, once as a view, and a mask that does not train."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.5))

    def forward(self, inputs, mask):
        return (inputs @ self.weight) * (inputs.view(8, 4) @ self.weight) * inputs * mask


def run(blocks):
    inputs, mask = torch.linspace(0.0, 1.0, 32).view(8, 4).requires_grad_(), torch.linspace(1.0, 2.0, 32).view(8, 4)
    states = inputs
    for block in blocks:
        states = block(states, mask)
    return states, inputs


@pytest.fixture
def made(monkeypatch):
    """The activations of every forward, in their order."""
    found = []
    begin = BlockActivations.__init__

    def record(self, *args):
        begin(self, *args)
        found.append(self)

    monkeypatch.setattr(BlockActivations, "__init__", record)
    return found


def test_what_shares_a_storage_is_copied_once_and_weights_and_masks_are_not(made):
    block = Block()
    ActivationOffload(CPU).wrap(block)
    run([block])
    first, second, product = 32, 32, 32  # the two results of @, and their product; `inputs` is a fourth one
    assert sorted(flat.numel() for flat in made[0].host) == [first, second, product, 32]
    addresses = {flat.data_ptr() for flat in made[0].host}
    assert block.weight.data_ptr() not in addresses and len(addresses) == 4


def test_the_block_before_is_fetched_while_a_block_runs_backward(made):
    blocks = [Block() for _ in range(3)]
    offload = ActivationOffload(CPU)
    for block in blocks:
        offload.wrap(block)
    states, inputs = run(blocks)

    def there():
        return [kept._on_device is not None for kept in made]

    assert there() == [False, False, True], "the last block stays: its backward pass comes first"
    seen = []
    for block in blocks:
        block.weight.register_hook(lambda _: seen.append(there()))
    states.sum().backward()
    assert seen[0] == [False, True, True]
    assert [True, True, True] in seen
    expected, plain_inputs = run([Block() for _ in range(3)])
    expected.sum().backward()
    assert torch.equal(inputs.grad, plain_inputs.grad)


def test_a_second_backward_over_the_same_graph_finds_all_of_it():
    blocks = [Block() for _ in range(2)]
    offload = ActivationOffload(CPU)
    for block in blocks:
        offload.wrap(block)
    states, inputs = run(blocks)
    states.sum().backward(retain_graph=True)
    once = inputs.grad.clone()
    states.sum().backward()
    assert torch.equal(inputs.grad, 2 * once)


def test_a_forward_without_a_backward_copies_nothing(made):
    actor = make(activation_offload=True)
    actor.compute(make_batch(), ("logprobs",), 1.0)
    assert not made
