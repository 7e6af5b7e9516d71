"""Fused steps against those of transformers."""

from itertools import chain

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from rft.rollout.engine.base import Request
from rft.rollout.engine.decoding.fused_step import FAMILIES, can_fuse, linear_groups
from tests.helpers import hf_engine
from tests.rollout.word_models import MODELS, MORE, SIZES, build, prompts_of, sampling

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHAPES = {
    "llama": {"attention_bias": True, "mlp_bias": True, "rope_parameters": ROPE},
    "mistral": {"sliding_window": None, "tie_word_embeddings": True},
    "qwen2": {"num_key_value_heads": 4},
    "qwen3": {"attention_bias": True, "hidden_act": "gelu", "rms_norm_eps": 0.1},
}


def of_family(kind):
    """A model in float64 whose biases and norms matter."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim" or kind != "qwen2"}
    config = AutoConfig.for_model(kind, **sizes | SHAPES[kind])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("lengths", [(6, 6), (3, 8, 30)])
def test_a_fused_step_computes_what_the_model_does(tokenizer, kind, lengths):
    """With padding and without. The model itself reads the prompts alone."""
    engine = hf_engine(of_family(kind), tokenizer, 64)
    steps = []
    engine.model.model.layers[1].register_forward_hook(lambda _, args, out: steps.append(args[0].shape[1]))
    limits = [12, 25, 40]  # rows that end at different times
    requests = [Request(p, [10 * i + j for j in range(3)], limits) for i, p in enumerate(prompts_of(*lengths))]
    fused = engine.generate(requests, sampling(max_new_tokens=40))
    assert 1 not in steps
    engine.fuses = False
    plain = engine.generate(requests, sampling(max_new_tokens=40))
    assert steps.count(1) > 10
    for one, other in zip(chain(*fused), chain(*plain), strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)  # transformers' norms round to float32


def test_new_weights_reach_fused_steps(tokenizer):
    engine, other = hf_engine(of_family("qwen2"), tokenizer, 64), of_family("qwen2")
    requests = [Request(prompts_of(5)[0], [1, 2])]
    first = engine.generate(requests, sampling())
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.mul_(1.5 if "proj" in name else 1.0)
    for asleep in (False, True):
        if asleep:
            engine.sleep()
        engine.update_weights(0, other.state_dict().items())
        assert engine.generate(requests, sampling()) == hf_engine(other, tokenizer, 64).generate(requests, sampling())
    assert engine.generate(requests, sampling()) != first


class OwnLlama(LlamaForCausalLM):
    """A class of somebody else may compute anything."""


def test_which_models_are_fused():
    assert all(can_fuse(of_family(kind)) for kind in FAMILIES)
    assert not any(can_fuse(build(name)) for name in [*MORE, "eager", "sliding"] if name != "qwen2")
    assert not can_fuse(OwnLlama(MODELS["llama"]().config))


def test_every_linear_layer_is_in_one_group():
    for model in (build("qwen3"), build("olmo2"), build("mixtral")):
        layers = [layer for group in linear_groups(model) for layer in group]
        assert len(layers) == len(set(layers))
        assert set(layers) == {module for module in model.modules() if isinstance(module, torch.nn.Linear)}
    assert sorted(map(len, linear_groups(build("qwen3")))) == [1, 1, 1, 1, 1, 2, 2, 3, 3]
