"""An export is written in the dtype of the files that its weights were read from, or in the one that is asked for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rft.actor.init import init_without_loading, load_model, read_config
from rft.actor.loading.export import exported, write_model
from rft.actor.model import loaded_dtype, most_common_dtype
from tests.helpers import (
    MODEL,
    OPTIMIZER,
    make_actor,
    make_algorithm,
    make_batch,
    make_optimizer,
    make_strategy,
    update,
    yaml_options,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUTED = {
    "vocab_size": 19, "hidden_size": 8, "intermediate_size": 12, "moe_intermediate_size": 4, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "n_routed_experts": 3, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def saved(folder, dtype, **changes):
    """A folder of a small model, as transformers writes it in this dtype."""
    config = AutoConfig.for_model(**{"vocab_size": 19} | MODEL | changes)
    load_model(None, config, 3).to(dtype).save_pretrained(folder)
    return str(folder)


def trained(world, path, dtype="float32", **options):
    """An actor that was updated once, computing in a dtype."""
    strategy = make_strategy(world, dtype=dtype)
    actor = make_actor(world, strategy, make_optimizer(**OPTIMIZER), path=path, model_config=None, **options)
    actor.begin_training(make_optimizer(**OPTIMIZER), 10)
    update(actor, make_batch(), make_algorithm())
    return actor


def tensors(folder):
    return load_file(Path(folder) / "model.safetensors")


def config(folder):
    return json.loads((Path(folder) / "config.json").read_text())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_export_has_the_dtype_of_the_files_that_were_loaded(dtype, world, tmp_path):
    actor = trained(world, saved(tmp_path / "base", dtype))
    actor.save_model(tmp_path / "out")
    weights = dict(actor.weights())
    written = tensors(tmp_path / "out")
    assert written.keys() == weights.keys() and config(tmp_path / "out")["dtype"] == str(dtype).removeprefix("torch.")
    for name, tensor in written.items():
        assert tensor.dtype == dtype and torch.equal(tensor, weights[name].to(dtype)), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == dtype
    assert all(weight.dtype == torch.float32 for weight in weights.values()), "what trains stays in float32"


def test_a_dtype_that_is_asked_for_comes_before_that_of_the_files_also_in_the_average(world, tmp_path):
    actor = trained(world, saved(tmp_path / "base", torch.bfloat16), ema=0.5)
    actor.save_model(tmp_path / "out", torch.float32)
    for name in ("out", "out_ema"):
        assert {tensor.dtype for tensor in tensors(tmp_path / name).values()} == {torch.float32}
        assert config(tmp_path / name)["dtype"] == "float32"


def test_adapters_are_merged_in_float32_and_rounded_once(world, tmp_path):
    """Also where the frozen weights compute in bfloat16."""
    path = saved(tmp_path / "base", torch.bfloat16)
    lora = yaml_options("actor/lora/lora.yaml", rank=2, targets=["q_proj"])
    actor = trained(world, path, "bfloat16", lora=lora)
    layer = "model.layers.0.self_attn.q_proj"
    parts = dict(actor.adapters.tensors())
    down, up = (parts[f"{layer}.lora_{part}.default.weight"].full_tensor() for part in "AB")
    expected = tensors(path)[f"{layer}.weight"].double() + lora["alpha"] / 2 * up.double() @ down.double()
    actor.save_model(tmp_path / "out")
    merged = tensors(tmp_path / "out")[f"{layer}.weight"]
    assert merged.dtype == torch.bfloat16 and not torch.equal(merged, tensors(path)[f"{layer}.weight"])
    assert torch.equal(merged, expected.bfloat16())
    actor.save_model(tmp_path / "whole", torch.float32)
    whole = tensors(tmp_path / "whole")[f"{layer}.weight"]
    assert (whole - expected).abs().max() < 1e-7 and not torch.equal(whole, merged.float())


def test_new_adapters_are_exported_in_float32_and_continued_ones_as_they_were(world, tmp_path):
    path = saved(tmp_path / "base", torch.bfloat16)
    lora = yaml_options("actor/lora/lora.yaml", rank=2, targets=["q_proj"], export="adapter")
    for source, asked, written in ((path, None, torch.float32), ("half", torch.float16, torch.float16)):
        trained(world, path, lora=lora).save_model(tmp_path / "half", asked)
        assert {t.dtype for t in load_file(tmp_path / "half/adapter_model.safetensors").values()} == {written}, source
    trained(world, str(tmp_path / "half"), lora=lora).save_model(tmp_path / "again")
    assert {t.dtype for t in load_file(tmp_path / "again/adapter_model.safetensors").values()} == {torch.float16}


def test_the_dtype_of_most_numbers_counts(tmp_path):
    """Not that of most tensors, and not the config's, which may be wrong; nor that of the scales of packed weights."""
    folder = saved(tmp_path / "base", torch.bfloat16)
    small = {f"{i}": torch.zeros(2) for i in range(9)} | {"packed": torch.zeros(999, dtype=torch.float8_e4m3fn)}
    save_file(small | {"large": torch.zeros(19, dtype=torch.bfloat16)}, tmp_path / "mixed.safetensors")
    torch.save({"w": torch.zeros(4, dtype=torch.float16), "n": torch.zeros(9).int()}, tmp_path / "pickled.bin")
    assert most_common_dtype([str(tmp_path / "mixed.safetensors")]) == torch.bfloat16
    assert most_common_dtype([str(tmp_path / "pickled.bin")]) == torch.float16
    assert most_common_dtype([]) is None
    named = read_config(folder, None, 19, "actor")
    named.dtype = torch.float16
    assert loaded_dtype(folder, named, None, None) == torch.bfloat16
    with init_without_loading():  # mode=plan reads no files
        assert loaded_dtype(folder, named, None, None) == torch.float16
    assert loaded_dtype(None, named, None, None) == torch.float32


def test_what_transformers_keeps_in_float32_stays_so(tmp_path):
    model = load_model(None, AutoConfig.for_model("glm4_moe", **ROUTED), 0)
    torch.nn.init.normal_(model.model.layers[1].mlp.gate.e_score_correction_bias)
    names = exported(model)
    write_model(model, ((key, model.state_dict()[key]) for key in names), tmp_path / "out", torch.bfloat16)
    model.save_pretrained(tmp_path / "whole")
    AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype="bfloat16").save_pretrained(tmp_path / "theirs")
    ours, theirs = tensors(tmp_path / "out"), tensors(tmp_path / "theirs")
    kept = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert ours[kept].dtype == torch.float32 and ours["lm_head.weight"].dtype == torch.bfloat16
    assert ours.keys() == theirs.keys()
    assert all(t.dtype == theirs[key].dtype and torch.equal(t, theirs[key]) for key, t in ours.items())


def test_the_parts_of_a_config_name_the_same_dtype(tmp_path):
    text = {key: value for key, value in MODEL.items() if key != "tie_word_embeddings"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"vocab_size": 19} | MODEL))
    model.config.text_config = AutoConfig.for_model(**{"vocab_size": 19} | text, dtype="float32")
    write_model(model, ((key, model.state_dict()[key]) for key in exported(model)), tmp_path, torch.bfloat16)
    assert config(tmp_path)["dtype"] == config(tmp_path)["text_config"]["dtype"] == "bfloat16"
