"""Packed and padded rows against each row alone through the plain model; models that keep their own attention."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rft.actor.forward.backbone import run_backbone
from rft.actor.init import attention
from rft.actor.packing import attention as module
from rft.actor.packing.attention import PADDED, use_packed_attention, use_padded_attention
from rft.actor.packing.kernels.sdpa import SdpaKernel
from rft.actor.packing.layout import pack_layout, shared_prefixes
from tests.e2e.host_waits import HostWaits
from tests.helpers import SIZES, token_batch

GPT2 = {"vocab_size": 23, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.4}
MODELS = {
    "qwen3": SIZES | {"model_type": "qwen3"},
    "llama, one head of keys": SIZES | {"model_type": "llama", "num_key_value_heads": 1},
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": 4},
    "mistral, a window as long as a row": SIZES | {"model_type": "mistral", "sliding_window": 12},
    "qwen2, one layer in two with a window": SIZES
    | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "gemma": SIZES | {"model_type": "gemma"},
    "gemma3_text": SIZES | {"model_type": "gemma3_text", "sliding_window": 5, "query_pre_attn_scalar": 9},
    "gemma2, capped products": SIZES
    | {"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0},
    "cohere2": SIZES | {"model_type": "cohere2", "sliding_window": 5},
    "gpt_oss_moe, sinks": SIZES
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    "qwen3_next_moe, linear attention": SIZES
    | {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    | {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4},
    "gpt2, learned positions": GPT2 | {"model_type": "gpt2"},
    "qwen3_moe": SIZES
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "deepseek_v3, values of another width": {key: SIZES[key] for key in SIZES if key != "head_dim"}
    | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 2},
}
PROMPTS = {3: 7, 5: 4}  # of groups
ROWS = [(3, 9), (4, 5), (3, 12), (5, 6), (3, 9), (5, 14), (6, 1)]  # group and length


def build(options, perturbed=True):
    """A model with opinions, and biases that are not zero."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) * perturbed
    return model


def prompts_batch():
    generator = torch.Generator().manual_seed(1)
    rows = []
    for group, length in ROWS:
        ids = torch.randint(1, 23, (length,), generator=generator)
        prompt = PROMPTS.get(group, 0)
        ids[:prompt] = torch.arange(group, group + prompt)
        ids[prompt : prompt + 1] = 3 + len(rows)  # where they part
        rows.append(ids)
    return token_batch(*rows, group=[group for group, _ in ROWS])


def states_and_gradients(model, states):
    """The states of all rows (sum of lengths, D), and the gradients of a weighed sum over all of them."""
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(2), dtype=states.dtype)
    parameters = [p for name, p in model.named_parameters() if not name.startswith("lm_head")]
    grads = torch.autograd.grad((states * weights).sum(), parameters, allow_unused=True)
    return states, [grad for grad in grads if grad is not None]


def alone(model, batch):
    rows = zip(batch["tokens", "input_ids"], ROWS, strict=True)
    return torch.cat([model.base_model(input_ids=ids[None, :length]).last_hidden_state[0] for ids, (_, length) in rows])


def together(model, batch, layout):
    columns = {"input_ids": batch["tokens", "input_ids"].flatten()[layout.source], "position_ids": layout.positions}
    inputs = {name: column[None] for name, column in columns.items()}
    states = model.base_model(**inputs, layout=layout, use_cache=False).last_hidden_state[0]
    return states[layout.place][batch["response_mask"]]


def close(found, expected, tolerance):
    """Relative to the largest number of a tensor."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_have_the_states_and_gradients_of_each_alone(name, shares):
    """Up to the rounding of what the models themselves compute in float32; GPT-2 computes nothing in it."""
    dtype = torch.float32 if "moe" in name else torch.float64
    plain, batch = build(MODELS[name]), prompts_batch()
    model = copy.deepcopy(plain)
    use_packed_attention(model, "actor")
    shared = shared_prefixes(batch) if shares else torch.zeros(len(ROWS), dtype=torch.int64)
    assert shared.tolist() == ([7, 0, 7, 4, 7, 4, 0] if shares else [0] * 7)
    layout = pack_layout(batch, shared)
    assert len(layout.source) == (56 - 2 * 7 - 4 if shares else 56)
    states, gradients = states_and_gradients(plain, alone(plain.to(dtype), batch))
    found = states_and_gradients(model, together(model.to(dtype), batch, layout))
    tolerance = 1e-12 if "gpt2" in name else 1e-5
    close([found[0]], [states], tolerance)
    close(found[1], gradients, tolerance)


def padded(model, batch):
    states, place = run_backbone(model.base_model, batch["tokens"], None)
    return states[place][batch["response_mask"]]


@pytest.mark.parametrize("name", MODELS)
def test_padded_rows_have_the_states_and_gradients_of_each_alone_and_read_nothing_on_the_host(name):
    dtype = torch.float32 if "moe" in name else torch.float64
    plain, batch, waits = build(MODELS[name]), prompts_batch(), []
    model = copy.deepcopy(plain)
    use_padded_attention(model)
    assert model.config._attn_implementation == PADDED != plain.config._attn_implementation
    states, gradients = states_and_gradients(plain, alone(plain.to(dtype), batch))
    with HostWaits(waits):
        run_backbone(model.to(dtype).base_model, batch["tokens"], None)
    assert waits == []
    found = states_and_gradients(model, padded(model, batch))
    close([found[0]], [states], 1e-5)
    close(found[1], gradients, 1e-5)
    if "gpt_oss" not in name:  # its masks do not depend on positions
        with HostWaits(waits):
            run_backbone(plain.base_model, batch["tokens"], None)
        assert waits


def test_the_windows_are_shorter_than_the_rows():
    batch = prompts_batch()
    wide, narrow = build(MODELS["mistral"] | {"sliding_window": None}), build(MODELS["mistral"])
    first = alone(wide, batch)[:9] - alone(narrow, batch)[:9]
    assert not first[:4].any() and first[4:].abs().max() > 0.1


HYBRIDS = {
    "falcon_h1": SIZES | {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8},
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "mamba": {"vocab_size": 23, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "llama4_text": SIZES | {"num_local_experts": 2, "intermediate_size_mlp": 24, "attention_chunk_size": 32},
}
OTHERS = {
    "gpt_neo": {"vocab_size": 23, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64}
    | {"attention_types": [[["global", "local"], 1]], "window_size": 32},
    "bloom": {"vocab_size": 23, "hidden_size": 16, "n_layer": 2, "n_head": 4},
}
UNTOLD = {  # windows that are longer than any row of the probe
    "qwen2_moe": SIZES
    | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1, "num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "phimoe": SIZES | {"sliding_window": 32, "num_local_experts": 2, "num_experts_per_tok": 1},
}
REFUSED = {
    **{kind: (options, "has layers of|has an attention that cannot") for kind, options in HYBRIDS.items()},
    **{kind: (options, "has an attention that cannot be replaced") for kind, options in OTHERS.items()},
    **{kind: (options, "mixes rows, or has a window that it does not state") for kind, options in UNTOLD.items()},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_would_mix_rows_are_refused(kind):
    """Also where new weights are so small that mixing would hardly show."""
    options, reason = REFUSED[kind]
    model = build(options | {"model_type": kind, "initializer_range": 2e-4}, perturbed=False)
    with pytest.raises(ValueError, match=rf"^critic\.packing: \w+ .*{reason}.*; set critic\.packing=false$"):
        use_packed_attention(model, "critic")


@pytest.mark.parametrize("kind", REFUSED)
def test_padded_rows_of_these_models_keep_their_attention(kind):
    model, batch = build(REFUSED[kind][0] | {"model_type": kind}), prompts_batch()
    implementation, states = model.config._attn_implementation, padded(model, batch)
    use_padded_attention(model)
    assert model.config._attn_implementation == implementation
    assert padded(model, batch).equal(states)


def test_padded_rows_keep_their_attention_where_a_window_would_be_lost(monkeypatch):
    attend = module.attend_rows
    monkeypatch.setattr(module, "attend_rows", lambda *states, rule: attend(*states, replace(rule, window=None)))
    model = build(MODELS["mistral"] | {"sliding_window": 4096})
    use_padded_attention(model)
    assert model.config._attn_implementation == "sdpa"
    model = build(MODELS["qwen3"])
    use_padded_attention(model)
    assert model.config._attn_implementation == PADDED


def test_a_look_at_a_model_leaves_its_windows():
    model = build(MODELS["gemma3_text"])
    layers = [layer.self_attn for layer in model.model.layers]
    before = [layer.sliding_window for layer in layers]
    use_packed_attention(model, "actor")
    assert [layer.sliding_window for layer in layers] == before and 5 in before
    assert model.config.sliding_window == 5 and model.config._attn_implementation == SdpaKernel.implementation


def test_a_window_that_does_not_reach_the_attention_is_found(monkeypatch):
    attend = SdpaKernel.attend

    def deaf(kernel, *states_and_segments):
        *others, rule = states_and_segments
        return attend(kernel, *others, replace(rule, window=None))

    monkeypatch.setattr(SdpaKernel, "attend", deaf)
    for options in (MODELS["mistral"], MODELS["mistral"] | {"sliding_window": 4096}):
        with pytest.raises(ValueError, match="has a window that it does not state"):
            use_packed_attention(build(options), "actor")
    use_packed_attention(build(MODELS["qwen3"]), "actor")


def test_small_new_weights_and_no_attention_at_all_pass():
    use_packed_attention(build(MODELS["qwen3"] | {"initializer_range": 1e-3}, perturbed=False), "actor")
    model = build(MODELS["qwen3"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    use_packed_attention(model, "actor")
