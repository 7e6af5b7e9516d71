"""Adapters in peft's format: merged into their base as peft does it, or trained on, and what is refused."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rft.actor.init import load_model, meta_model, read_config
from rft.actor.loading.deferred_init import Drawing
from rft.actor.lora.base import find_adapter
from rft.setup.loadable import check_loadable
from tests.actor.lora.adapters import logprobs, make, update, weights
from tests.helpers import MODEL, identical, make_batch


@pytest.fixture
def saved(tmp_path):
    """Makes the folders of a base and of an adapter of random numbers, as peft saves them."""

    def make(targets=("q_proj", "down_proj"), model=MODEL, **options):
        base = load_model(None, read_config(None, model, 19, "actor"), 3)
        base.save_pretrained(tmp_path / "base")
        config = LoraConfig(r=3, lora_alpha=7, target_modules=list(targets), **options)
        adapted = get_peft_model(base, config)
        torch.manual_seed(1)
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.data.normal_()
        adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        adapted.save_pretrained(tmp_path / "adapter")
        return str(tmp_path / "adapter")

    return make


def merged_by_peft(adapter):
    base = AutoModelForCausalLM.from_pretrained(find_adapter(adapter).base)
    return PeftModel.from_pretrained(base, adapter).merge_and_unload().state_dict()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MODEL, {}),
        (MODEL | {"tie_word_embeddings": True}, {"use_rslora": True}),
        (MODEL, {"alpha_pattern": {"layers.1.mlp.down_proj": 5}, "rank_pattern": {"q_proj": 2}}),
        (
            {"model_type": "gpt2", "n_embd": 12, "n_layer": 2, "n_head": 2},
            {"targets": ["c_attn", "c_fc"], "fan_in_fan_out": True},
        ),
    ],
    ids=["plain", "tied, rslora", "patterns", "transposed"],
)
@pytest.mark.parametrize("on_meta", [True, False])
def test_without_lora_the_adapter_is_merged_as_peft_does_it(world, saved, model, options, on_meta):
    adapter = saved(model=model, **options)
    expected = merged_by_peft(adapter)
    if on_meta:
        found = weights(make(world, path=adapter, packing=model is not MODEL, share_prefix=False))
    else:
        found = load_model(adapter, read_config(adapter, None, 0, "actor"), 0).state_dict()
    assert identical(found, {name: tensor for name, tensor in expected.items() if name in found})
    assert not identical(found, load_model(find_adapter(adapter).base, config_of(adapter), 0).state_dict())


def config_of(adapter):
    return read_config(adapter, None, 0, "actor")


def test_a_value_head_takes_the_merged_backbone(world, saved):
    adapter = saved()
    critic = make(world, path=adapter, key="critic", head="value")
    expected = merged_by_peft(adapter)
    for name, tensor in critic.network.model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), expected[f"model.{name}"]), name


def test_an_exported_adapter_trains_on(world, tmp_path):
    base = load_model(None, read_config(None, MODEL, 19, "actor"), 3)
    base.save_pretrained(tmp_path / "base")
    options, batch = {"rank": 2, "export": "adapter"}, make_batch()
    first = make(world, options, path=str(tmp_path / "base"))
    update(first, batch, 2)
    first.save_model(tmp_path / "adapter")
    second = make(world, options, path=str(tmp_path / "adapter"), seed=5)
    assert torch.equal(logprobs(second, batch), logprobs(first, batch))
    trains = {name for name, parameter in second.network.named_parameters() if parameter.requires_grad}
    assert trains and all("lora_" in name for name in trains)
    update(second, batch)
    second.save_model(tmp_path / "again")
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "again")]
    assert files[0].keys() == files[1].keys() and not identical(*files)
    assert find_adapter(str(tmp_path / "again")).base == str(tmp_path / "base")


@pytest.mark.parametrize(
    ("options", "lora", "message"),
    [
        (
            {},
            {"rank": 4, "alpha": 7},
            r"actor\.lora\.rank=4: the adapter of actor\.path has 3; set actor\.lora\.rank=3",
        ),
        ({}, {"alpha": 8}, r"actor\.lora\.alpha=8: the adapter of actor\.path has 7"),
        ({"use_rslora": True}, {"alpha": 7}, r"actor\.lora\.rslora=False: .* has True; set actor\.lora\.rslora=true"),
        (
            {},
            {"alpha": 7},
            r"targets=all-linear: the adapter of actor\.path lacks model\.layers\.0\.mlp\.gate_proj; set",
        ),
        ({}, {"alpha": 7, "targets": ["q_proj"]}, r"the adapter of actor\.path has model\.layers\.0\.mlp\.down_proj"),
        ({"rank_pattern": {"q_proj": 2}}, {"alpha": 7}, r"actor\.path: the adapter has a rank_pattern, with which"),
    ],
)
def test_other_options_are_refused_before_weights_are_read(world, saved, options, lora, message, monkeypatch):
    adapter = saved(**options)
    monkeypatch.setattr("rft.actor.model.load_with_head", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=message):
        make(world, {"rank": 3} | lora, path=adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, r"use_dora=True: merge this adapter with peft"),
        ({"base_model_name_or_path": None}, r"base_model_name_or_path in adapter_config\.json is empty"),
        (
            {"base_model_name_or_path": "nowhere/at/all"},
            r"no model can be read from 'nowhere/at/all', the base of the ad",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_the_key(saved, change, message):
    adapter = saved()
    file = f"{adapter}/adapter_config.json"
    with open(file) as opened:
        options = json.load(opened) | change
    with open(file, "w") as opened:
        json.dump(options, opened)
    with pytest.raises(ValueError, match=rf"actor\.path: .*{message}"):
        read_config(adapter, None, 0, "actor")


@pytest.mark.parametrize("loads", [True, False])
def test_an_adapter_of_another_model_is_refused(saved, tmp_path, loads):
    adapter = saved()
    load_model(None, read_config(None, MODEL | {"hidden_size": 40}, 19, "actor"), 3).save_pretrained(tmp_path / "base")
    config = read_config(adapter, None, 0, "actor")
    with pytest.raises(ValueError, match=r"has no layer model\.layers\.0\.mlp\.down_proj of the shape \[20, 24\]; cor"):
        if loads:
            load_model(adapter, config, 0, drawing=Drawing())
        else:
            check_loadable(config, adapter, "lm", "actor", reads_weights=True)


def test_tensors_and_ties_that_cannot_be_merged_are_refused(saved):
    adapter = find_adapter(saved(modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match=r"lm_head\.weight is no adapter of a linear layer; merge it with scripts"):
        _ = adapter.layers
    tied = find_adapter(saved(["lm_head"], MODEL | {"tie_word_embeddings": True}))
    stored = {name: tensor for name, tensor in load_file(tied.file).items() if "lora_" in name}
    save_file(stored, tied.file)
    with pytest.raises(ValueError, match="the weight of lm_head is tied to another one; merge it with peft"):
        tied.check(meta_model(config_of(tied.path)))


def test_a_folder_without_its_tensors_or_with_a_model_is_refused(saved, tmp_path):
    adapter = saved()
    save_file({}, tmp_path / "adapter" / "model.safetensors")
    (tmp_path / "adapter" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has a model \(config\.json\) and an adapter \(adapter_config\.json\); move"):
        find_adapter(adapter)
    (tmp_path / "adapter" / "config.json").unlink()
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"the adapter has no adapter_model\.safetensors; copy it there"):
        find_adapter(adapter)
    assert find_adapter(str(tmp_path / "base")) is None
