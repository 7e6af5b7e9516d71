"""Blocks that compute their activations again: the same gradient from fewer bytes and more operations."""

import weakref
from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft.distributed import start
from tests.helpers import (
    LENGTHS,
    MODEL,
    OPTIMIZER,
    close,
    make_actor,
    make_batch,
    make_optimizer,
    make_strategy,
    update,
)

KINDS = ("none", "selective", "full")
WIDE = MODEL | {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 16}


class Watch(TorchDispatchMode):
    """Counts operations, and the bytes that live of what they made."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        self.operations[operation.overloadpacket.__name__] += 1
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(made):
            if storage._cdata not in self._seen | given:
                self._seen.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return made

    def _free(self, number: int, size: int) -> None:
        self._seen.discard(number)
        self.bytes -= size


def storages(tree):
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if type(leaf) in (torch.Tensor, torch.nn.Parameter)]


def make(head="lm", **options):
    torch.set_num_threads(1)
    world, optimizer = start("cpu"), make_optimizer(**OPTIMIZER)
    key = {"lm": "actor", "value": "critic"}[head]
    actor = make_actor(world, make_strategy(world, **options), optimizer, key=key, head=head, model_config=WIDE)
    actor.begin_training(optimizer, 10)
    return actor


@pytest.fixture(scope="module")
def watches():
    return {kind: watched(kind) for kind in KINDS}


def watched(kind):
    """The operations of an update, and the bytes that the blocks keep for its backward."""
    actor, kept = make(activation_checkpointing=kind), []
    backbone = actor.network.model.base_model
    update(actor, make_batch())  # what weights are gathered into is there now
    with Watch() as watch:
        for module in (backbone.layers[0], backbone.norm):
            module.register_forward_pre_hook(lambda *_: kept.append(watch.bytes))
        update(actor, make_batch())
    return watch.operations, kept[1] - kept[0]


@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_the_updates_are_the_same(kind, head):
    one, other = make(head), make(head, activation_checkpointing=kind)
    for _ in range(2):
        assert update(other, make_batch()) == pytest.approx(update(one, make_batch()), rel=1e-6)
    close(dict(other.weights()), dict(one.weights()), 1e-6)


def test_the_blocks_keep_fewer_bytes_for_the_backward(watches):
    none, selective, full = (watches[kind][1] for kind in KINDS)
    inputs = 4 * sum(LENGTHS) * WIDE["hidden_size"] * WIDE["num_hidden_layers"]
    assert inputs <= full < 1.2 * inputs
    assert full < 0.4 * selective and selective < 0.6 * none


def test_all_is_computed_again_or_all_but_products_and_attention(watches):
    count = {kind: operations for kind, (operations, _) in watches.items()}
    blocks = WIDE["num_hidden_layers"]
    for cheap in ("silu", "rsqrt"):
        for kind in ("selective", "full"):
            assert count[kind][cheap] >= count["none"][cheap] + blocks
    for dear in ("mm", "_scaled_dot_product_flash_attention_for_cpu"):
        assert count["selective"][dear] == count["none"][dear]
        assert count["full"][dear] >= count["none"][dear] + blocks


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_without_a_backward_computes_once(kind):
    actor, batch = make(activation_checkpointing=kind), make_batch()
    with Watch() as watch:
        actor.compute(batch, ("logprobs",), 1.0)
    assert watch.operations["silu"] == WIDE["num_hidden_layers"]


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_names_stay_those_of_the_model(kind, tmp_path):
    one, other = make(), make(activation_checkpointing=kind)
    assert list(dict(other.network.named_parameters())) == list(dict(one.network.named_parameters()))
    assert list(dict(other.weights())) == list(dict(one.weights()))
    assert other.state_dict()["network"].keys() == one.state_dict()["network"].keys()
    one.load_state_dict(other.state_dict())
    other.save_model(tmp_path)
    assert type(one.plain_model()).from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [True, False])
def test_gathered_blocks_are_kept_until_the_backward_or_freed(kept):
    actor, gathered = make(reshard_after_forward=not kept), []
    backbone = actor.network.model.base_model

    def record(*_):
        gathered.append(sum(p.nbytes for p in backbone.layers.parameters() if not isinstance(p, DTensor)))

    backbone.norm.register_forward_hook(record)  # behind the last block
    update(actor, make_batch())
    whole = sum(p.nbytes for name, p in actor.weights() if ".layers." in name)
    assert gathered == [whole if kept else 0]
    assert all(isinstance(p, DTensor) for p in backbone.parameters()), "after the update all is freed"
