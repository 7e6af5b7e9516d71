"""Optimizers, frozen parts and the average of the weights: two processes do what one does, and go on where one was."""

import pytest
import torch

from tests.strategy.jobs import ALL_ON_ONE, MODEL, OPTIMIZER, UNEVEN, close, job

ODD = MODEL | {"intermediate_size": 25, "num_hidden_layers": 3}  # neither rows nor layers divide over two ranks
EXPERTS = MODEL | {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
}
EMBEDDINGS = {"frozen": ["model.embed_tokens.*", "model.layers.0.*", "*.self_attn.k_norm.weight"]}


def optimized(name, shares=UNEVEN, **changes):
    return job(shares, optimizer=OPTIMIZER | {"name": name}, **{"model": ODD, "updates": 3} | changes)


JOBS = {
    "adamw": optimized("adamw"),
    "adamw_8bit": optimized("adamw_8bit"),
    "adamw_8bit, experts": optimized("adamw_8bit", model=EXPERTS),
    "muon": optimized("muon"),
    "muon, one rank without a row": optimized("muon", ALL_ON_ONE),
    "muon, replicas": optimized("muon", strategy={"replicas": 2}),
    "muon, experts": optimized("muon", model=EXPERTS),
    "muon, critic": optimized("muon", head="value"),
    "frozen": optimized("adamw", actor=EMBEDDINGS),
    "frozen, tied": optimized("adamw", model=MODEL | {"tie_word_embeddings": True}, actor={"frozen": ["lm_head.weight"]}),
    "frozen, critic": optimized("adamw", head="value", actor={"frozen": ["model.*"]}),
    "average": optimized("adamw", actor={"ema": 0.6}),
    "average of what trains": optimized("muon", actor={"ema": 0.6} | EMBEDDINGS),
}


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks, perform):
    alone = {name: on_one(name) for name in JOBS if "replicas" not in name}
    onwards = {f"{name}, onwards": made | {"state": perform(made | {"updates": 2})["state"], "updates": 1} for name, made in alone.items()}
    return on_two_ranks(JOBS | onwards)


def on_one(name):
    return JOBS[name] | {"strategy": {}}


@pytest.mark.parametrize("name", JOBS)
def test_x(name, perform, two_ranks):
    one, two = perform(on_one(name)), two_ranks[name]
    for k in ("gradient", "weights"):
        print(name, k, max(float((two[k][n]-one[k][n]).abs().max()/one[k][n].abs().max()) for n in one[k]))
    if f"{name}, onwards" in two_ranks:
        o = two_ranks[f"{name}, onwards"]["weights"]
        print(name, "onwards", max(float((o[n]-one["weights"][n]).abs().max()/one["weights"][n].abs().max()) for n in o))
    b = perform(on_one(name) | {"updates": 2})["state"]
    again = perform(on_one(name) | {"updates": 1, "state": b})["weights"]
    print("resume", all(torch.equal(again[n], one["weights"][n]) for n in again))
    b = two["state"]
