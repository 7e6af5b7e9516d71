"""The prefix of a backbone in models whose class names it, and in that of Llama 4, which names another."""

from transformers import AutoConfig, AutoModelForCausalLM

from rft.actor.init import meta_model
from rft.actor.loading.tensor_names import inner_prefix, outer_prefix
from tests.helpers import SIZES

LLAMA4 = {"model_type": "llama4_text", "num_local_experts": 2, "intermediate_size_mlp": 24}


def test_a_class_that_names_its_backbone():
    model = meta_model(AutoConfig.for_model(**SIZES, model_type="qwen3"))
    assert inner_prefix(model) == "model." and outer_prefix(model) == ""
    assert outer_prefix(model.base_model) == "model."


def test_llama4_names_the_prefix_of_another_class():
    config = AutoConfig.for_model(**SIZES | LLAMA4)
    model = meta_model(config)
    assert model.base_model is model.model and inner_prefix(model) == "model."
    assert AutoModelForCausalLM.from_config(config).base_model_prefix == "language_model"
