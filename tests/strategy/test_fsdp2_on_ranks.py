"""Optimizers, frozen parts and the average of the weights: two processes do what one does, and go on where one was."""

import pytest
import torch

from tests.helpers import ALL_ON_ONE, DISTILL, METHOD, MODEL, OPTIMIZER, UNEVEN, close, job, make_batch
from tests.strategy.updates_on_ranks import with_teacher

pytestmark = pytest.mark.slow
ODD = MODEL | {"intermediate_size": 25, "num_hidden_layers": 3}  # neither rows nor layers divide over two ranks
EXPERTS = MODEL | {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
BALANCE = {"router_balance": {"name": "router_balance", "coef": 1.0}}
FROZEN = {"frozen": ["model.embed_tokens.*", "model.layers.0.*", "*.self_attn.k_norm.weight"]}


def trained(name, shares=UNEVEN, **changes):
    return job(shares, optimizer=OPTIMIZER | {"name": name}, **{"model": ODD, "updates": 3} | changes)


SAME_GRADIENT = {  # where all rows are on one rank the gradients are equal, and so must be what follows
    "adamw_8bit": trained("adamw_8bit", ALL_ON_ONE),
    "adamw_8bit, experts": trained("adamw_8bit", ALL_ON_ONE, model=EXPERTS),
    "muon": trained("muon", ALL_ON_ONE),
    "muon, experts": trained("muon", ALL_ON_ONE, model=EXPERTS),
    "muon, replicas": trained("muon", ALL_ON_ONE, strategy={"replicas": 2}),
}
SPREAD = {
    "adamw_8bit, spread": trained("adamw_8bit"),
    "muon, spread": trained("muon"),
    "frozen": trained("adamw", actor=FROZEN),
    "frozen, tied": trained("adamw", model=MODEL | {"tie_word_embeddings": True}, actor={"frozen": ["lm_head.*"]}),
    "frozen, critic": trained("adamw", head="value", actor={"frozen": ["model.*"]}),
    "router balance": trained("adamw", model=EXPERTS, algorithm=METHOD | {"terms": BALANCE}),
    "teacher": trained("adamw", algorithm=DISTILL, batch=with_teacher(make_batch())),
    "average": trained("adamw", actor={"ema": 0.6}),
    "average of what trains": trained("muon", actor={"ema": 0.6} | FROZEN),
}
GO_ON = ("adamw_8bit", "muon", "frozen", "average", "average of what trains")


def on_one(name, **changes):
    return {**SAME_GRADIENT, **SPREAD}[name] | {"strategy": {}} | changes


@pytest.fixture(scope="module")
def one_rank(perform):
    return {name: perform(on_one(name)) for name in (*SAME_GRADIENT, *SPREAD)}


@pytest.fixture(scope="module")
def two_ranks(on_two_ranks, perform):
    states = {name: perform(on_one(name, updates=2))["state"] for name in GO_ON}
    onwards = {f"{name}, onwards": on_one(name, updates=1, state=state) for name, state in states.items()}
    return on_two_ranks(SAME_GRADIENT | SPREAD | onwards)


def optimizer_tensors(result):
    state = result["state"]["optimizer"]["state"]
    return {f"{name}.{part}": tensor.double() for name, parts in state.items() for part, tensor in parts.items()}


@pytest.mark.parametrize("name", SAME_GRADIENT)
def test_the_same_gradient_gives_the_same_weights_and_codes(name, one_rank, two_ranks):
    one, two = one_rank[name], two_ranks[name]
    close(two["gradient"], one["gradient"], 1e-4)  # the third one: the norms of the first two were summed in parts
    close(two["weights"], one["weights"], 1e-4)
    for part, tensor in optimizer_tensors(one).items():  # now and then one rounds to its other neighbour
        other = optimizer_tensors(two)[part]
        assert ((other - tensor).abs() > 1e-4 * tensor.abs().max()).double().mean() < 0.02


@pytest.mark.parametrize("name", SPREAD)
def test_two_processes_do_what_one_does(name, one_rank, two_ranks):
    one, two = one_rank[name], two_ranks[name]
    close(two["gradient"], one["gradient"], 3e-4)
    close(two["weights"], one["weights"], 2e-4)  # a code, or a bfloat16 of Muon, may round to its other neighbour
    if "average" in one["state"]:
        assert two["state"]["average"]["updates"] == one["state"]["average"]["updates"] == 3
        close(two["state"]["average"]["weights"], one["state"]["average"]["weights"], 1e-6)


@pytest.mark.parametrize("name", GO_ON)
def test_a_state_goes_on_on_as_many_processes_and_on_others(name, perform, one_rank, two_ranks):
    one = one_rank[name]
    again = perform(on_one(name, updates=1, state=perform(on_one(name, updates=2))["state"]))
    close(again["weights"], one["weights"], 0.0)
    on_two = two_ranks[f"{name}, onwards"]
    tolerance = 2e-4 if "trains" in name else 1e-6  # a bfloat16 of Muon may round to its other neighbour
    close(on_two["weights"], one["weights"], tolerance)
    back = perform(on_one(name, updates=1, state=two_ranks[name]["state"]))
    close(back["weights"], perform(on_one(name, updates=1, state=one["state"]))["weights"], 2e-4)
    for result in (again, on_two):
        if "average" in one["state"]:
            assert result["state"]["average"]["updates"] == 3
            close(result["state"]["average"]["weights"], one["state"]["average"]["weights"], tolerance)


def test_what_is_frozen_is_on_no_rank_in_gradient_or_state(one_rank, two_ranks, perform):
    start = perform(on_one("frozen", optimizer=OPTIMIZER | {"lr": 0.0}))["weights"]
    two = two_ranks["frozen"]
    moved = {name for name, tensor in two["weights"].items() if not torch.equal(tensor, start[name])}
    still = {name for name in start if "embed_tokens" in name or "layers.0." in name or "k_norm" in name}
    assert len(still) == 1 + 11 + 2 and moved == start.keys() - still
    assert {name for name in two["state"]["optimizer"]["state"]} == moved
    assert len(two["gradient"]) == len(moved)
