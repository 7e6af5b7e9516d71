"""The predicted work of a row against the operations that are counted in a real forward and backward."""

import pytest
import torch
from tensordict import TensorDict
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rft.actor.packing.layout import pack_layout, shared_prefixes
from rft.actor.packing.micro_batches import model_cost, model_flops, row_work
from rft.batch.balance import Cost, work
from rft.batch.collate import collate
from rft.distributed import start
from tests.helpers import make_actor, make_strategy

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
KINDS = {
    "qwen3": {"head_dim": 24},
    "llama": {"tie_word_embeddings": True},
    "gpt2": {"n_inner": 128},
    "mixtral": {**EXPERTS, "sliding_window": None},
    "qwen3_moe": {**EXPERTS, "num_experts": 8, "moe_intermediate_size": 48, "head_dim": 16},
}


def model(kind, **changes):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE | changes))


def product(total, left, right, **_):
    return 2 * left[0] * left[1] * right[1]


def counted(act):
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product}) as counter:
        act().sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("length", [32, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_cost_what_is_predicted(kind, length):
    whole = model(kind, **KINDS[kind])
    cost = model_cost(whole)
    ids = torch.arange(length)[None] % 50
    found = counted(lambda: whole.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    # eager attention computes the masked half as well
    predicted = work(torch.tensor([length]), cost.linear, 2 * cost.quadratic)
    assert found == pytest.approx(float(predicted), rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_costs_trained_tokens_alone(tied):
    world = start("cpu")
    shape = {"model_type": "qwen3", **SHAPE, "tie_word_embeddings": tied}
    del shape["vocab_size"], shape["experts_implementation"]
    actor = make_actor(world, make_strategy(world), model_config=shape, packing=False)
    actor.network.requires_grad_(True)
    ids = torch.arange(40)[None] % 19
    tokens = TensorDict({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, batch_size=[1])

    def trained(count):
        select = torch.arange(40)[None] > 39 - count
        return counted(lambda: actor.network(tokens, select, ("logprobs",), 1.0)["logprobs"])

    assert trained(30) - trained(10) == pytest.approx(20 * actor.cost.head, rel=0.02)


def test_a_window_bounds_what_a_token_looks_at():
    full, windowed = (model_cost(model("mistral", sliding_window=window)) for window in (None, 16))
    assert windowed.quadratic == 0 and windowed.head == full.head
    length = torch.tensor([128])
    assert windowed.linear - full.linear == 2 * 16 * full.quadratic
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    mixed = model_cost(model("qwen3", head_dim=16, layer_types=kinds, sliding_window=16, use_sliding_window=True))
    plain = model_cost(model("qwen3", head_dim=16))
    assert mixed.quadratic == plain.quadratic / 3
    assert work(length, mixed.linear, mixed.quadratic) < work(length, plain.linear, plain.quadratic)


def test_a_value_model_has_no_head_over_words():
    world = start("cpu")
    shape = {"model_type": "qwen3", **SHAPE}
    del shape["vocab_size"], shape["experts_implementation"]
    actor = make_actor(world, make_strategy(world), key="critic", head="value", model_config=shape)
    assert actor.cost.head == 0 and actor.cost.linear > 0


def test_rows_that_share_a_prefix_share_what_it_costs():
    rows = []
    for group, ending in enumerate([(4,), (2, 5, 1), (3, 3)]):
        for number, length in enumerate(ending):
            ids = torch.cat([torch.arange(6 * group), torch.full((length,), 100 + number)])  # 0, 6 and 12 shared
            tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            rows.append({"tokens": tokens, "response_mask": ids > 99, "loss_mask": ids > 99, "group": group})
    batch = collate(rows)
    shared = shared_prefixes(batch)
    tokens = row_work(Cost(linear=1.0, quadratic=0.0, head=0.0), batch, shared)
    assert float(tokens.sum()) == pytest.approx(len(pack_layout(batch, shared).source))
    squares = row_work(Cost(linear=0.0, quadratic=1.0, head=0.0), batch, shared)
    assert squares.tolist() == pytest.approx([16, 8**2 - 24, 11**2 - 24, 7**2 - 24, 15**2 - 72, 15**2 - 72])
    assert row_work(Cost(0.0, 0.0, 2.0), batch, shared).tolist() == [8, 4, 10, 2, 6, 6]
    alone = row_work(Cost(linear=1.0, quadratic=2.0, head=0.0), batch, torch.zeros_like(shared))
    assert torch.equal(alone, work(torch.tensor([4, 8, 11, 7, 15, 15]), 1.0, 2.0))


def test_the_operations_of_two_rows_by_hand():
    cost = model_cost(model("qwen3", head_dim=24))
    rows = []
    for tokens, trained in ((10, 4), (6, 3)):
        ids, trains = torch.arange(tokens), torch.arange(tokens) >= tokens - trained
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        rows.append({"tokens": tensors, "response_mask": trains, "loss_mask": trains, "group": 0})
    batch, none = collate(rows), torch.zeros(2, dtype=torch.int64)
    # a layer: queries and output 64 * 96 each, keys and values 64 * 48 each, three matrices of 64 * 128
    weights = 3 * (2 * 6144 + 2 * 3072 + 3 * 8192)
    assert weights == 129_024
    # 16 tokens; 100 + 36 pairs of tokens in 3 layers of 4 heads of 24; 7 trained tokens and a head of 64 * 50
    assert model_flops(cost, batch, none) == 6 * 16 * 129_024 + 6 * 136 * 3 * 96 + 6 * 7 * 3200 == 12_755_712
    # both begin with the same 6 tokens, which are computed once
    shared = torch.full((2,), 6)
    assert model_flops(cost, batch, shared) == 12_755_712 - (6 * 6 * 129_024 + 6 * 36 * 3 * 96)
