"""Compiled blocks: the same updates, from graphs that serve every block and every length."""

import random
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from rft.distributed import start
from rft.strategy.compiled import compile_function
from tests.helpers import MODEL, OPTIMIZER, close, make_actor, make_batch, make_optimizer, make_strategy, update

DEEP = MODEL | {"num_hidden_layers": 6}
ROWS = ([1, 3, 5], [0, 2], [7, 6, 5, 4, 3, 2, 1, 0], [4])


@pytest.fixture
def fresh():
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make(layout=(), **options):
    world, optimizer = start("cpu"), make_optimizer(**OPTIMIZER)
    actor = make_actor(world, make_strategy(world, **options), optimizer, model_config=DEEP, **dict(layout))
    actor.begin_training(optimizer, 10)
    return actor


@pytest.mark.slow
@pytest.mark.suite
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_updates_are_the_same_and_nothing_is_compiled_again(checkpointing, fresh):
    one, other = make(), make(compile=True, activation_checkpointing=checkpointing)
    assert list(dict(other.network.named_parameters())) == list(dict(one.network.named_parameters()))
    batches = [make_batch()[torch.tensor(rows)] for rows in ROWS]
    for batch in batches:
        assert update(other, batch) == pytest.approx(update(one, batch), rel=1e-4)
        assert counters["stats"]["unique_graphs"] == 1, "blocks share it, and so do all lengths"
    close(dict(other.weights()), dict(one.weights()))
    for batch in batches:
        found, expected = (actor.compute_outputs(batch, ("logprobs",), 1.0, None) for actor in (other, one))
        close(found, expected)
        assert counters["stats"]["unique_graphs"] == 2, "one more without gradients"
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_many_micro_batches_with_shared_prefixes_have_one_graph(checkpointing, fresh):
    """Of 1 to 8 rows of 3 to 12 tokens, with and without a prefix that two rows share."""
    options = {"packing": True, "share_prefix": True, "micro_batch_tokens": 24}
    one, other = make(options), make(options, compile=True, activation_checkpointing=checkpointing)
    draw, shared = random.Random(0), []
    for _ in range(12):
        batch = make_batch(prompt=draw.randint(0, 2))[torch.tensor(draw.sample(range(8), draw.randint(1, 8)))]
        found, expected = update(other, batch), update(one, batch)
        assert found == pytest.approx(expected, rel=1e-3)
        shared.append(found["prefix/shared"])
    assert len(set(shared)) > 3
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    close(dict(other.weights()), dict(one.weights()), 1e-4)


@pytest.fixture
def traced(fresh, monkeypatch):
    """Without code generation, which takes long."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def test_other_sizes_have_the_same_graph(traced):
    double = compile_function(lambda states: states * 2)
    for size in (5, 3, 64, 1000):
        assert double(torch.ones(size, 7)).sum() == 14 * size
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_more_kinds_than_the_limit_of_torch_are_compiled(traced):
    count = compile_function(lambda states, name: states + len(name))
    for kind in range(20):
        count(torch.ones(3), "x" * kind)
    assert counters["stats"]["unique_graphs"] == 20
