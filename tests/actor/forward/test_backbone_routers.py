"""The balance of routers by hand, against transformers' own loss, and whatever way rows lie in a forward."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rft.actor.forward.routers import RouterRecorder
from rft.actor.heads import LanguageNetwork
from rft.actor.init import load_model, read_config
from rft.distributed import start
from rft.setup.assembly import Job
from tests.helpers import METHOD, MODEL, close, job, make_batch
from tests.strategy import updates_on_ranks

EXPERTS = MODEL | {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "norm_topk_prob": True,
}
TERM = {"router_balance": {"name": "router_balance", "coef": 0.3}}
BALANCED = METHOD | {"terms": TERM}


def test_the_balance_by_hand():
    """Two rows of 2 and 1 tokens among 4 of a forward; 3 experts, one for each token."""
    affinity = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.5, 0.25, 0.25], [0.2, 0.6, 0.2]])
    chosen = torch.tensor([[0], [2], [0], [1]])
    recorder = RouterRecorder([affinity.log(), torch.zeros(4, 3)], [chosen, chosen])
    found = recorder.balance(lambda tokens: tokens[[0, 3, 2]], torch.tensor([0, 0, 1]), 2)
    # row 0: tokens 0 and 3 went to experts 0 and 1, so f = 3/2, 3/2, 0; row 1: token 2 to expert 0, f = 3, 0, 0
    # the second router has affinities of 1/3: f_i P_i is 1 in all
    shares = [(1.5 * 0.9 + 1.0) / 2, (1.5 * 0.8 + 1.0) / 2, 3 * 0.5 + 1.0]
    assert found.tolist() == pytest.approx(shares, rel=1e-6)


def test_it_is_transformers_own_for_one_row():
    model = load_model(None, read_config(None, EXPERTS, 19, "actor"), 0)
    batch = make_batch()[3:4]
    keep = batch["tokens", "attention_mask"].bool()
    columns = LanguageNetwork(model)(batch["tokens"], keep, ("router_balance",), 1.0)
    ids = batch["tokens", "input_ids"][keep][None, :-1]  # the states that predict something
    logits = model(ids, output_router_logits=True).router_logits
    theirs = sum(load_balancing_loss_func((layer,), 5, 2) for layer in logits) / 2  # they sum over the k places
    assert columns["router_balance"].sum().item() == pytest.approx(theirs.item(), rel=1e-5)
    assert not columns["router_balance"][:, 0].any()


@pytest.mark.parametrize(
    ("actor", "strategy"),
    [
        ({"packing": False}, {}),
        ({"packing": True, "micro_batch_tokens": 10**6}, {}),
        ({"packing": True, "share_prefix": True}, {}),
        ({}, {"activation_checkpointing": "full"}),
        ({}, {"activation_checkpointing": "selective"}),
    ],
)
def test_the_gradient_is_the_same_however_rows_lie(actor, strategy):
    world = start("cpu")
    made = job(model=EXPERTS, algorithm=BALANCED, updates=1)
    expected = updates_on_ranks.perform(made, world)
    found = updates_on_ranks.perform(made | {"actor": actor, "strategy": strategy}, world)
    close(found["gradient"], expected["gradient"], 2e-5)
    assert found["numbers"][0]["loss/router_balance"] == pytest.approx(expected["numbers"][0]["loss/router_balance"])


def test_it_reaches_the_routers_and_only_where_it_is_asked_for():
    world = start("cpu")
    with_term, without = (
        updates_on_ranks.perform(job(model=EXPERTS, algorithm=METHOD | {"terms": terms}), world) for terms in (TERM, {})
    )
    names = [name for name in with_term["weights"]]
    moved = {
        name
        for name, mine, theirs in zip(names, with_term["gradient"].values(), without["gradient"].values(), strict=True)
        if (mine - theirs).abs().max() > 1e-4 * theirs.abs().max()
    }
    assert {name for name in names if name.endswith("mlp.gate.weight")} <= moved and "lm_head.weight" not in moved
    assert "loss/router_balance" not in without["numbers"][0]


@pytest.mark.slow
def test_routers_learn_to_spread():
    world = start("cpu")
    only = METHOD | {"loss": {"name": "nll"}, "aggregation": {"name": "token_mean"}, "terms": {
        "router_balance": {"name": "router_balance", "coef": 10.0}}}  # fmt: skip
    found = updates_on_ranks.perform(job(model=EXPERTS, algorithm=only, updates=30), world)
    losses = [numbers["loss/router_balance"] for numbers in found["numbers"]]
    assert losses[-1] < losses[0] and losses[-1] > 2 * 0.95  # 1 for each of two routers at best, but for small rows


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], r"^algorithm\.terms\.router_balance: a qwen3 has no router that transformers knows"),
        (
            ["strategy.compile=true"],
            r"^strategy\.compile: router_balance is recorded by hooks in the blocks of the actor",
        ),
    ],
)
def test_what_is_refused(changes, said, tiny):
    with pytest.raises(ValueError, match=said):
        Job(tiny("algorithm/terms=[router_balance]", *changes)).fit("")
