"""Actors with adapters and without, and what tests ask of them."""

import torch

from rft.algorithm.check import build_algorithm
from rft.algorithm.objective import Update
from rft.algorithm.options import AlgorithmOptions
from rft.batch.collate import dummy_row
from rft.metrics import Metrics
from tests.actor.lora.lora_on_ranks import lora_options
from tests.helpers import METHOD, MODEL, OPTIMIZER, make_actor, make_optimizer, make_strategy


def make(world, lora=None, key="actor", head="lm", trains=True, seed=0, **changes):
    """An actor; with adapters where `lora` is their options that differ from the yaml."""
    optimizer = make_optimizer(**OPTIMIZER) if trains else None
    model = {"model_config": MODEL} if "path" not in changes else {}
    options = {"lora": None if lora is None else lora_options(**lora), "head": head} | model | changes
    strategy = options.pop("strategy", None) or make_strategy(world)
    actor = make_actor(world, strategy, optimizer, key=key, seed=seed, **options)
    if optimizer is not None:
        actor.begin_training(optimizer, 10)
    return actor


def update(actor, batch, count=1):
    algorithm, metrics = build_algorithm(AlgorithmOptions(**METHOD), "algorithm"), Metrics()
    for _ in range(count):
        rows = batch.clone()
        algorithm.compute_loss_weights(rows, actor.world.all_sum)
        objective = {"critic": algorithm.learners["critic"]}.get(actor.key, algorithm.policy)
        actor.update(rows, dummy_row(batch, rows), Update(objective), 0.8, metrics)
    return metrics.reduce(actor.world.gather)


def weights(actor):
    return {name: tensor.clone() for name, tensor in actor.weights()}


def same(found, expected, tolerance=1e-6):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def logprobs(actor, batch):
    return actor.compute(batch, ("logprobs",), 0.8)["logprobs"]


def held(actor):
    return sum(parameter.to_local().nbytes for parameter in actor.network.parameters())
