"""Trains adapters on any number of ranks: what test_lora.py runs alone and under torchrun.

torchrun --nproc-per-node 2 lora_on_ranks.py folder
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rft.algorithm.check import build_algorithm
from rft.algorithm.objective import Update
from rft.algorithm.options import AlgorithmOptions
from rft.batch.collate import dummy_row
from rft.distributed import World, leave, start
from rft.metrics import Metrics
from tests.helpers import (
    METHOD,
    MODEL,
    OPTIMIZER,
    UNEVEN,
    make_actor,
    make_batch,
    make_optimizer,
    make_strategy,
    yaml_options,
)
from tests.train.checkpoint.states import whole_state

SHARES = {1: [list(range(8))], 2: UNEVEN, 4: [[3], [7, 6], [5, 4, 2, 1, 0], []]}
BIASES = {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
SPLIT: dict[str, dict[str, Any]] = {
    "split": {"spread": {"tensor_parallel": 2}},
    "split, biases": {
        "spread": {"tensor_parallel": 2},
        "model": BIASES,
        "targets": ["o_proj", "layers.1.mlp.*"],
        "rslora": True,
    },
    "split, experts": {"spread": {"tensor_parallel": 2}, "model": EXPERTS},
    "experts": {"spread": {"expert_parallel": 2}, "model": EXPERTS},
}
JOBS: dict[str, dict[str, Any]] = {
    "all-linear": {},
    "some, tied": {"targets": ["q_proj", "layers.1.mlp.*"], "rslora": True, "model": {"tie_word_embeddings": True}},
    "bfloat16": {"dtype": "bfloat16"},
    "nf4": {"quantize": "nf4", "targets": ["self_attn.*"]},
    "nf4 in bfloat16": {"quantize": "nf4", "dtype": "bfloat16"},
} | SPLIT


def lora_options(**changes):
    return yaml_options("actor/lora/lora.yaml", **{"rank": 3, **changes})


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def perform(
    world: World,
    folder: Path,
    model: dict[str, Any] | None = None,
    dtype: str = "float32",
    spread: dict[str, int] | None = None,
    **lora: Any,
) -> dict[str, Any]:
    """Two updates with a reference that is kept between them; everything that came of it, whole.

    Args:
        folder: where the adapter is saved.
        model: what differs from MODEL.
        spread: options of the strategy on several ranks.
        lora: options that differ from their yaml.
    """
    optimizer = make_optimizer(**OPTIMIZER)
    shape = {"micro_batch_tokens": 20, "model_config": MODEL | (model or {})}
    strategy = make_strategy(world, dtype=dtype, **((spread or {}) if world.size > 1 else {}))
    policy = make_actor(world, strategy, optimizer, lora=lora_options(**lora), **shape)
    policy.begin_training(optimizer, 10)
    algorithm, batch = build_algorithm(AlgorithmOptions(**METHOD), "algorithm"), make_batch()
    places = torch.tensor(SHARES[world.size][world.rank], dtype=torch.int64)
    mine = batch[places]
    reference = policy.frozen_copy("reference")
    norms, gradients = [], {}

    def update():
        metrics, rows = Metrics(), mine.clone()
        algorithm.compute_loss_weights(rows, world.all_sum)
        policy.update(rows, dummy_row(batch, rows), Update(algorithm.policy), 0.8, metrics)
        norms.append(metrics.reduce(world.gather)["grad_norm"])

    def column(actor):
        spread = torch.zeros(batch["loss_mask"].shape)
        spread[places] = actor.compute(mine, ("logprobs",), 0.8, dummy_row(batch, mine))["logprobs"]
        return world.all_sum(spread)

    clip = policy.strategy.clip_grad_norm

    def recording(parameters, max_norm):
        named = [(name, p) for name, p in policy.network.named_parameters() if p.grad is not None]
        gradients.update({name: whole(p.grad) for name, p in named})
        return clip(parameters, max_norm)

    policy.strategy.clip_grad_norm = recording
    columns = {"base": column(policy)}
    update()
    reference.copy_weights_from(policy)
    columns["kept"] = column(policy)
    update()
    columns |= {"reference": column(reference), "policy": column(policy)}
    policy.adapters.exported_alone = True
    policy.save_model(folder)
    assert policy.train_state is not None
    moments = [
        value for state in policy.train_state.optimizer.state.values() for value in state.values() if value.dim() > 0
    ]
    return {
        "norms": norms,
        "gradients": gradients,
        "columns": columns,
        "weights": {name: tensor.clone() for name, tensor in policy.weights()},
        "reference weights": {name: tensor.clone() for name, tensor in reference.weights()},
        "names": world.gather([name for name, _ in policy.weights()]),
        "state": whole_state(policy),
        "reference state": whole_state(reference),
        "moments": sum(world.gather(sum(moment.to_local().nbytes for moment in moments))),
    }


def main() -> None:
    torch.set_num_threads(1)
    world = start("cpu")
    folder = Path(sys.argv[1])
    jobs = JOBS if world.size == 2 else SPLIT
    results = {name: perform(world, folder / name, **job) for name, job in jobs.items()}
    if world.rank == 0:
        torch.save(results, folder / "results.pt")
    leave()


if __name__ == "__main__":
    main()
