"""Trains models that take media, and computes columns of random layouts of rows; alone and under torchrun.

torchrun --nproc-per-node 2 media_on_ranks.py results.pt
"""

import random
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rft.actor.actor import Actor
from rft.actor.base import ModelContext
from rft.algorithm.check import build_algorithm
from rft.algorithm.objective import Update
from rft.algorithm.options import AlgorithmOptions
from rft.batch.collate import dummy_row
from rft.distributed import World, leave, start
from rft.metrics import Metrics
from tests.families import family
from tests.families.rows import OMNI, batch_of, encoder, rows
from tests.helpers import NLL, actor_options, make_optimizer, make_strategy

CASES = {
    "qwen2_5_vl": True,
    "llava": True,
    "gemma3": False,
    "qwen2_audio": False,
    OMNI: True,
}  # whether rows are packed
LAYOUTS = 20  # of each family, 100 in all
UNEVEN = [[0, 2, 4, 6], [1, 3, 5, 7]]  # only the first rank has media


def build(world: World, name: str, packing: bool, folder: Path) -> tuple[Actor, Any]:
    """A trainable actor of a family, and the batch of eight rows."""
    one = family(name)
    encode = encoder(one)
    path = world.decide(lambda: str(save(one, folder / name)))
    context = ModelContext(
        "actor", world, make_strategy(world), encode.processor.tokenizer, 0, media=encode.media_facts
    )
    optimizer = make_optimizer(lr=1e-3, warmup_updates=0)
    actor = Actor(context, actor_options(optimizer, path=path, packing=packing, micro_batch_tokens=150))
    actor.begin_training(optimizer, 10)
    return actor, batch_of(encode, rows(one) * 2)


def save(one: Any, folder: Path) -> Path:
    one.model().save_pretrained(folder)
    return folder


def perform(world: World, folder: Path) -> dict[str, Any]:
    """Weights and numbers after two updates of each family, and columns of random layouts."""
    found: dict[str, Any] = {}
    algorithm = build_algorithm(AlgorithmOptions(**NLL | {"critic_loss": None}), "algorithm")
    for name, packing in CASES.items():
        actor, batch = build(world, name, packing, folder)
        drawn, columns = random.Random(name), []
        for _ in range(LAYOUTS):
            place = [drawn.randrange(2) for _ in range(8)]
            own = [row for row in range(8) if world.size == 1 or place[row] == world.rank]
            part = batch[torch.tensor(own, dtype=torch.int64)]
            computed = actor.compute(part, ("logprobs",), 1.0, dummy_row(batch, part))["logprobs"]
            column = torch.zeros(batch["loss_mask"].shape)
            column[own] = computed
            columns.append(world.all_sum(column))
        own = batch if world.size == 1 else batch[torch.tensor(UNEVEN[world.rank])]
        numbers = []
        for _ in range(2):
            metrics, part = Metrics(), own.clone()
            algorithm.compute_loss_weights(part, world.all_sum)
            actor.update(part, dummy_row(batch, part), Update(algorithm.policy), 1.0, metrics)
            numbers.append(metrics.reduce(world.gather))
        weights = {
            key: tensor.clone() for key, tensor in actor.strategy.full_tensors(actor.network.state_dict().items())
        }
        found[name] = {"columns": torch.stack(columns), "numbers": numbers, "weights": weights}
    return found


def main() -> None:
    torch.set_num_threads(1)
    world = start("cpu")
    with TemporaryDirectory() as folder:
        shared = Path(world.decide(lambda: folder))
        found = perform(world, shared)
        world.decide(lambda: None)
    if world.rank == 0:
        torch.save(found, Path(sys.argv[1]))
    leave()


if __name__ == "__main__":
    main()
