"""Ranks that share the experts of every layer do what one process does, with some of the experts each."""

import pytest
import torch

from rft.actor.init import load_model, meta_model, read_config
from rft.distributed import start
from rft.strategy.parallel.experts import ExpertParallel, check_experts, find_experts
from tests.helpers import MODEL, close, job
from tests.strategy.parallel.test_tensor_parallel_grid import BALANCED, EXPERTS, SHARED_EXPERT, SHARES

# Families of transformers 5.19 with a plan for experts that a small config of these names makes.
FAMILIES = (
    "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo",
    "glm4_moe", "glm4_moe_lite", "gpt_oss", "hunyuan_v1_moe", "hy_v3", "kimi_linear", "laguna", "lfm2_moe", "mellum",
    "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
ANY_FAMILY = {
    **dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "moe_layer_interval"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 0),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 4),
    "q_lora_rank": None,
    "layer_types": ["full_attention"] * 2,
    "mlp_layer_types": ["sparse"] * 2,
    "pad_token_id": 0,
}

TOGETHER = {"expert_parallel": 2}


def given(strategy=None, **changes):
    plain = job(strategy=TOGETHER | (strategy or {}), **{"updates": 2, "model": EXPERTS} | changes)
    return plain | {"shares": {1: plain["shares"][1], 4: SHARES}}


JOBS = {
    "two groups": given(algorithm=BALANCED),
    "one group": given({"expert_parallel": 4}),
    "two replicas, recomputed": given({"replicas": 2, "activation_checkpointing": "full"}),
    "sequences are split too": given({"context_parallel": 2}, algorithm=BALANCED),
    "whole and kept": given({"accumulate": "whole", "reshard_after_forward": False}),
    "mixtral, recomputed, selective": given(
        {"activation_checkpointing": "selective"}, model=EXPERTS | {"model_type": "mixtral", "num_local_experts": 4}
    ),
    "qwen2_moe, a shared expert, a frozen block": given(
        model=EXPERTS | SHARED_EXPERT, actor={"frozen": ["model.layers.0.*"]}
    ),
    "critic in host memory, an average": given({"param_offload": "all"}, head="value", actor={"ema": 0.6}),
}
ROUGH = given({"dtype": "bfloat16"}, updates=1, model=EXPERTS | {"hidden_size": 16})  # rows of whole 16 bytes


@pytest.fixture(scope="module")
def one_rank(perform):
    return {name: perform(job | {"strategy": {}}) for name, job in JOBS.items()}


@pytest.fixture(scope="module")
def four_ranks(on_ranks, one_rank):
    onwards = JOBS["two groups"] | {"updates": 1, "state": one_rank["two groups"]["state"]}
    others = {"onwards": onwards, "bfloat16": ROUGH, "not split": given({"expert_parallel": 1})}
    return on_ranks(JOBS | others, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_four_ranks_do_what_one_does(name, one_rank, four_ranks):
    one, four = one_rank[name], four_ranks[name]
    close(four["gradient"], one["gradient"], 1e-5)
    close(four["weights"], one["weights"])
    for expected, number in zip(one["numbers"], four["numbers"], strict=True):
        assert number == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert (four["column"] - one["column"]).abs().max() < 1e-5
    assert four["names"] == one["names"] * 4


@pytest.mark.slow
def test_bfloat16_stays_close(four_ranks, perform):
    one = perform(ROUGH | {"strategy": {"dtype": "bfloat16"}})["numbers"][0]
    assert four_ranks["bfloat16"]["numbers"][0]["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.05)


@pytest.mark.slow
def test_a_state_goes_on_on_one_process_and_on_four(perform, one_rank, four_ranks):
    onwards = JOBS["two groups"] | {"strategy": {}, "updates": 1}
    expected = perform(onwards | {"state": one_rank["two groups"]["state"]})
    close(four_ranks["onwards"]["weights"], expected["weights"])
    back = perform(onwards | {"state": four_ranks["two groups"]["state"]})
    close(back["weights"], expected["weights"])


@pytest.mark.slow
def test_a_rank_gathers_its_experts_alone_and_exchanges_tokens(four_ranks):
    found, plain = four_ranks["whole and kept"], four_ranks["not split"]
    total = sum(tensor.nbytes for tensor in found["weights"].values())
    experts = sum(tensor.nbytes for name, tensor in found["weights"].items() if ".experts." in name)
    assert max(found["held"]) <= 0.27 * total and max(plain["held"]) <= 0.27 * total
    blocks = sum(tensor.nbytes for name, tensor in found["weights"].items() if ".layers." in name)
    assert found["gathered"] == [blocks - experts // 2] * 4
    micro_batches, layers = 2, 2
    passes = 2 * micro_batches * layers  # forward and backward
    assert found["collectives"]["all_to_all float32"] == 2 * passes, "tokens to the experts, and back"
    assert found["collectives"]["all_to_all int64"] == micro_batches * layers, "how many tokens"
    assert "all_to_all float32" not in plain["collectives"]


@pytest.mark.parametrize(
    ("size", "shards", "complaint"),
    [
        (3, 1, "the 4 experts of layers.0.mlp.experts of actor do not divide over 3 ranks; choose another"),
        (2, 3, "the 16 rows of experts of layers.0.mlp.experts of actor do not divide over 3 ranks; choose"),
    ],
)
def test_experts_that_cannot_be_split_are_refused(size, shards, complaint):
    backbone = meta_model(read_config(None, EXPERTS, 19, "actor")).base_model
    with pytest.raises(ValueError, match=rf"^strategy\.expert_parallel={size}: {complaint}"):
        check_experts(backbone, size, shards, "strategy.expert_parallel", "actor")


def test_an_actor_without_experts_is_refused_and_another_model_is_not():
    world = start("cpu")
    group = ExpertParallel(world.mesh, world.mesh)
    backbone = meta_model(read_config(None, MODEL, 19, "actor")).base_model
    group.check_model(backbone, "reward")
    with pytest.raises(
        ValueError, match=r"^strategy\.expert_parallel=1: transformers has no plan for experts of Qwen3"
    ):
        group.check_model(backbone, "actor")


@pytest.mark.parametrize("kind", FAMILIES)
def test_split_experts_of_one_rank_compute_what_they_did(kind):
    """Every family weights what its experts return, so a rank can compute its tokens with weights of 1."""
    world = start("cpu")
    options = EXPERTS | SHARED_EXPERT | ANY_FAMILY | {"model_type": kind}
    backbone = load_model(None, read_config(None, options, 19, "actor"), 0).base_model
    states, chosen = torch.randn(7, 20), torch.randint(4, (7, 2))
    weights = torch.rand(7, 2)
    for experts in find_experts(backbone).values():
        expected = experts(states, chosen, weights)
        assert expected.abs().mean() > 1e-3
        ExpertParallel(world.mesh, world.mesh).split(experts)
        torch.testing.assert_close(experts(states, chosen, weights), expected)
    assert len(find_experts(backbone)) == 2
