"""Compiled blocks: the same updates, from graphs that serve every block and every length."""

import pytest
import torch
from torch._dynamo.utils import counters

from rft.distributed import start
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


def make(**options):
    world, optimizer = start("cpu"), make_optimizer(**OPTIMIZER)
    actor = make_actor(world, make_strategy(world, **options), optimizer, model_config=DEEP)
    actor.begin_training(optimizer, 10)
    return actor


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_updates_are_the_same_and_nothing_is_compiled_again(checkpointing, fresh):
    one, other = make(), make(compile=True, activation_checkpointing=checkpointing)
    assert list(dict(other.network.named_parameters())) == list(dict(one.network.named_parameters()))
    batches = [make_batch()[torch.tensor(rows)] for rows in ROWS]
    assert update(other, batches[0]) == pytest.approx(update(one, batches[0]), rel=1e-4)
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs < DEEP["num_hidden_layers"], "blocks share them"
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches[1:]:
            assert update(other, batch) == pytest.approx(update(one, batch), rel=1e-4)
    assert counters["stats"]["unique_graphs"] == graphs
    close(dict(other.weights()), dict(one.weights()))


def test_operations_of_compiled_blocks_cannot_be_selected():
    with pytest.raises(ValueError, match=r"^strategy\.activation_checkpointing=selective .* strategy\.compile=false"):
        make_strategy(start("cpu"), compile=True, activation_checkpointing="selective")
