"""A run of text trains the text part of a model that reads more; a run with media trains the whole."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from rft.actor.init import language_model_class, load_model, read_config
from rft.actor.loading.deferred_init import Drawing
from rft.actor.loading.families import text_config
from tests.helpers import SIZES

VISION = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 64}
WHOLE = {
    "llama4": {
        "text_config": SIZES | {"num_local_experts": 2, "intermediate_size_mlp": 24},
        "vision_config": VISION
        | {"num_hidden_layers": 1, "image_size": 8, "patch_size": 4, "vision_output_dim": 16}
        | {"projector_input_dim": 16, "projector_output_dim": 16},
    },
    "qwen3_5": {
        "text_config": SIZES | {"layer_types": ["full_attention"] * SIZES["num_hidden_layers"]},
        "vision_config": VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": SIZES["hidden_size"]},
    },
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("drawing", [Drawing, lambda: None])
def test_the_text_part_of_a_folder_is_loaded_with_its_weights(name, drawing, tmp_path):
    whole = AutoModelForMultimodalLM.from_config(AutoConfig.for_model(name, **WHOLE[name]))
    whole.save_pretrained(tmp_path)
    text = load_model(str(tmp_path), read_config(str(tmp_path), None, 0, "actor", media=False), 0, drawing=drawing())
    assert type(text).__name__.endswith("ForCausalLM") and text.config.get_text_config() is text.config
    ids = torch.tensor([[1, 2, 3]])
    if not next(text.parameters()).is_meta:
        torch.testing.assert_close(text(input_ids=ids).logits, whole.eval()(input_ids=ids).logits, rtol=0, atol=1e-5)
    everything = load_model(str(tmp_path), read_config(str(tmp_path), None, 0, "actor"), 0, drawing=drawing())
    assert type(everything) is type(whole)


def test_what_is_stored_otherwise_stays_known_and_other_models_stay_whole():
    config = AutoConfig.for_model("llama4", **WHOLE["llama4"], quantization_config={"quant_method": "fp8"})
    assert text_config(config).quantization_config == config.quantization_config
    assert language_model_class(text_config(config)).__name__ == "AutoModelForCausalLM"
    for name in ("gemma3", "mllama", "qwen3", "qwen2_5_vl"):
        config = AutoConfig.for_model(name)
        assert text_config(config) is config
