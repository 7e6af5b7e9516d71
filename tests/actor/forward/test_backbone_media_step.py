"""One training step of every family that reads media: all parts learn, and packed rows as padded ones."""

import pytest
import torch

from rft.algorithm.check import build_algorithm
from rft.algorithm.objective import Update
from rft.algorithm.options import AlgorithmOptions
from rft.batch.collate import dummy_row
from rft.distributed import start
from rft.metrics import Metrics
from tests.actor.forward.media_on_ranks import build
from tests.families.rows import PACKED, READ
from tests.helpers import NLL


def stepped(name, packing, folder):
    """The weights before and after a step, and its numbers."""
    world = start("cpu")
    actor, batch = build(world, name, packing, folder)
    before = {key: tensor.clone() for key, tensor in actor.network.state_dict().items()}
    algorithm, metrics = build_algorithm(AlgorithmOptions(**NLL | {"critic_loss": None}), "algorithm"), Metrics()
    algorithm.compute_loss_weights(batch, world.all_sum)
    actor.update(batch, dummy_row(batch, batch), Update(algorithm.policy), 1.0, metrics)
    return before, dict(actor.network.state_dict()), metrics.reduce(world.gather)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_a_step(name, tmp_path):
    before, after, numbers = stepped(name, False, tmp_path)
    assert numbers["grad_norm"] > 0
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    towers = [key for key in moved if "vision" in key or "visual" in key or "audio" in key]
    assert towers and len(moved) > len(towers), "weights of the towers, and of the language model"
    if name in PACKED:
        _, _, same = stepped(name, True, tmp_path)
        assert same["grad_norm"] == pytest.approx(numbers["grad_norm"], rel=1e-4)
        assert same["loss/nll"] == pytest.approx(numbers["loss/nll"], rel=1e-5)
