"""Trains on a batch of a file on any number of ranks: what the tests here run alone and under torchrun.

torchrun --nproc-per-node 2 updates_on_ranks.py jobs.pt results.pt
"""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rft.actor.base import NonFiniteError
from rft.algorithm.check import build_algorithm
from rft.algorithm.objective import Update
from rft.algorithm.options import AlgorithmOptions
from rft.batch.collate import dummy_row
from rft.distributed import World, leave, start
from rft.metrics import Metrics
from rft.strategy.fsdp2 import FSDP2
from rft.strategy.gather import to_local
from tests.actor.packing.kernels import references
from tests.helpers import make_actor, make_optimizer, make_strategy
from tests.train.checkpoint.states import restore, whole_state

COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}


def with_teacher(batch: TensorDict) -> TensorDict:
    """The batch with a teacher's log-probabilities of four tokens in each place, out of five."""
    generator, shape = torch.Generator().manual_seed(1), batch["loss_mask"].shape
    batch["teacher_top_ids"] = torch.rand(*shape, 19, generator=generator).argsort(-1)[..., :4].int()
    batch["teacher_top_logprobs"] = torch.randn(*shape, 5, generator=generator).log_softmax(-1)[..., :4]
    return batch


class Collectives(TorchDispatchMode):
    """Counts the collectives of FSDP by their name, as "reduce_scatter float32".

    Attributes:
        backward: reductions of gradients, and ends of the backward passes of blocks, in their order.

    Args:
        blocks: of the network.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._watch_input, f"end of block {number}"))
        self.clear()

    def clear(self) -> None:
        self.calls: Counter[str] = Counter()
        self.backward: list[str] = []

    def _watch_input(self, event: str, block: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Lets the gradient of the input, which the backward pass of a block computes last, record the event."""
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: self.backward.append(event))

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if operation.namespace == "c10d" and name in COLLECTIVES:
            tensor = next(leaf for leaf in tree_leaves(args) if type(leaf) is torch.Tensor)
            self.calls[f"{COLLECTIVES[name]} {str(tensor.dtype).removeprefix('torch.')}"] += 1
            if COLLECTIVES[name] == "reduce_scatter":
                self.backward.append("reduce_scatter")
        return operation(*args, **(kwargs or {}))


class Recording(FSDP2):
    """Remembers the last gradient before it is clipped."""

    gradient: dict[str, torch.Tensor]

    def clip_grad_norm(self, parameters, max_norm):
        parameters = list(parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        grads = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
        self.gradient = {str(number): grad.clone() for number, grad in enumerate(grads)}
        return super().clip_grad_norm(parameters, max_norm)


def local_bytes(parameter: torch.Tensor) -> int:
    return to_local(parameter).nbytes


def perform(job: dict[str, Any], world: World) -> dict[str, Any]:
    """The weights, gradient and numbers after some updates, and everything needed to go on.

    Args:
        job: `algorithm`, `model`, `head`, `strategy` and `actor` (options), `cap`, `updates`, `batch`, `shares` (rows
            of each rank), `state` (of an actor to go on from, or None) and maybe `kernel` (of references.KERNELS).
    """
    if "kernel" in job:
        with pytest.MonkeyPatch.context() as patch:
            references.install(job["kernel"], patch)
            return perform({key: value for key, value in job.items() if key != "kernel"}, world)
    strategy = make_strategy(world, Recording, **job["strategy"])
    optimizer = make_optimizer(**job["optimizer"])
    key = {"lm": "actor", "value": "critic"}[job["head"]]
    shape = {"head": job["head"], "micro_batch_tokens": job["cap"], "model_config": job["model"]} | job["actor"]
    actor = make_actor(world, strategy, optimizer, key=key, **shape)
    actor.begin_training(optimizer, 30)
    if job["state"] is not None:
        restore(actor, job["state"])
    algorithm = build_algorithm(AlgorithmOptions(**job["algorithm"]), "algorithm")
    objective = algorithm.learners["critic"] if job["head"] == "value" else algorithm.policy
    assert objective is not None
    gathered: list[int] = []
    backbone = actor.network.model.base_model
    backbone.norm.register_forward_hook(lambda *_: gathered.append(sum(map(local_bytes, backbone.layers.parameters()))))
    collectives, batch = Collectives(backbone.layers), job["batch"]
    mine = batch[torch.tensor(job["shares"][world.size][world.rank], dtype=torch.int64)]
    numbers = []
    try:
        for _ in range(job["updates"]):
            metrics, rows = Metrics(), mine.clone()
            algorithm.compute_loss_weights(rows, world.all_sum)
            watch = ("entropy",) if job["head"] == "lm" else ()
            collectives.clear()
            with collectives:
                actor.update(rows, dummy_row(batch, rows), Update(objective, watch), 0.8, metrics)
            numbers.append(metrics.reduce(world.gather))
    except NonFiniteError as problem:
        return {"suspects": world.gather(problem.suspects)}
    output = objective.outputs[0]
    computed = actor.compute(mine, (output,), 0.8, dummy_row(batch, mine))[output]
    column = torch.zeros(*batch["loss_mask"].shape, *computed.shape[2:])
    column[job["shares"][world.size][world.rank]] = computed
    return {
        "numbers": numbers,
        "collectives": dict(collectives.calls),  # of the last update
        "backward": collectives.backward,
        "held": world.gather(sum(map(local_bytes, actor.network.parameters()))),
        "gathered": world.gather(gathered[-1]),  # of the blocks, behind the last one
        "gradient": strategy.gradient,
        "column": world.all_sum(column),
        "weights": {name: tensor.clone() for name, tensor in strategy.full_tensors(actor.network.state_dict().items())},
        "names": world.gather([name for name, _ in actor.weights()]),
        "state": whole_state(actor),
    }


def main() -> None:
    torch.set_num_threads(1)
    world = start("cpu")
    jobs = torch.load(Path(sys.argv[1]), weights_only=False)
    results = {name: perform(job, world) for name, job in jobs.items()}
    if world.rank == 0:
        torch.save(results, Path(sys.argv[2]))
    leave()


if __name__ == "__main__":
    main()
