"""What is refused of a model before its weights are read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2_5OmniConfig

from rft.actor.init import load_model, read_config, read_weights
from rft.actor.loading.deferred_init import Drawing
from rft.actor.model import empty_like
from rft.data.encode.tokenizer import characters
from rft.setup.assembly import Job
from rft.setup.loadable import check_loadable, check_vocabulary
from tests.families import family

TINY = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def refused(path, model_config):
    with pytest.raises(ValueError) as caught:
        check_loadable(read_config(path, model_config, 19, "actor"), path, "lm", "actor", reads_weights=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "abc"}, "actor.model_config.hidden_size=abc: transformers cannot use it (TypeError: Field"),
        ({"hidden_size": -1}, "actor.model_config: transformers cannot build the model (RuntimeError"),
        ({"hidden_size": 0}, "actor.model_config: the weight model.embed_tokens.weight has no element"),
        ({"hidden_act": "nosuch"}, "actor.model_config: transformers cannot build the model (KeyError: 'nosuch')"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "actor.model_config: num_attention_heads=4 is no multiple",
        ),
        ({"head_dim": 3}, "actor.model_config: head_dim=3: rotary embeddings turn pairs"),
        ({"num_hidden_layers": -1}, "actor.model_config: transformers cannot use it (ValueError: `num_hidden_layers`"),
    ],
)
def test_values_of_a_new_model_that_cannot_be_built(changes, message):
    assert refused(None, TINY | changes).startswith(message)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("clip", "transformers has no causal language model of type clip"),
        ("t5", "transformers has no causal language model of type t5"),
        ("whisper", "a whisper states no max_position_embeddings"),
        ("mamba", "a mamba states no max_position_embeddings"),
        ("bert", "each token of a bert reads those after it"),
        ("gemma3", "Gemma3ForConditionalGeneration reads more than text"),
    ],
)
def test_models_that_are_not_for_text(kind, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert refused(str(tmp_path), None).startswith(f"actor.path={tmp_path}: {message}")


def test_gpt_neox_reads_text_from_left_to_right():
    config = AutoConfig.for_model("gpt_neox", vocab_size=19, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    assert config.is_decoder is False
    check_loadable(config, None, "lm", "actor", reads_weights=True)


@pytest.fixture
def folder(tmp_path):
    AutoModelForCausalLM.from_config(AutoConfig.for_model(vocab_size=19, **TINY)).save_pretrained(tmp_path)
    return tmp_path


def test_damaged_folders(folder):
    path, config, weights = str(folder), folder / "config.json", folder / "model.safetensors"
    check_loadable(read_config(path, None, 19, "actor"), path, "lm", "actor", reads_weights=True)
    saved, whole = config.read_text(), weights.read_bytes()
    config.write_text(json.dumps(json.loads(saved) | {"vocab_size": 99}))
    assert "lm_head.weight in model.safetensors has the shape [19, 16], but config.json needs [99, 16]" in refused(
        path, None
    )
    config.write_text(saved[:40])
    assert refused(path, None).startswith("actor.path: no model can be read from")
    config.write_text(saved)
    weights.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors is damaged" in refused(path, None)
    weights.unlink()
    check_loadable(read_config(path, None, 19, "actor"), path, "lm", "actor", reads_weights=False)
    assert "the folder has no weights" in refused(path, None)
    (folder / "model-1.safetensors").write_bytes(whole)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "model-2.safetensors"}}))
    assert "names model-2.safetensors, which is not in the folder" in refused(path, None)


def test_a_folder_that_lacks_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = "the weights lack model.layers.0.mlp.up_proj.weight; copy the whole model there"
    assert refused(str(folder), None) == f"actor.path={folder}: {message}"
    weights["another"] = weights["lm_head.weight"].clone()  # as if transformers were to rename it
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_config(str(folder), None, 19, "actor")
    check_loadable(config, str(folder), "lm", "actor", reads_weights=True)
    with pytest.raises(ValueError, match=message):
        load_model(str(folder), config, 0)


def test_a_model_with_another_head_needs_no_language_head(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_config(str(folder), None, 19, "critic")
    check_loadable(config, str(folder), "value", "critic", reads_weights=True)
    load_model(str(folder), config, 0, headed=False)
    assert "the weights lack lm_head.weight" in refused(str(folder), None)


def test_a_tied_head_needs_no_tensor(tmp_path):
    config = AutoConfig.for_model(vocab_size=19, tie_word_embeddings=True, **TINY)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    config = read_config(str(tmp_path), None, 19, "actor")
    check_loadable(config, str(tmp_path), "lm", "actor", reads_weights=True)
    load_model(str(tmp_path), config, 0)


@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_weights(folder, legacy):
    path, pickled = str(folder), folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), pickled, _use_new_zipfile_serialization=not legacy)
    (folder / "model.safetensors").unlink()
    check_loadable(read_config(path, None, 19, "actor"), path, "lm", "actor", reads_weights=True)
    whole = pickled.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"garbage"):
        pickled.write_bytes(damaged)
        assert refused(path, None).startswith(f"actor.path={path}: pytorch_model.bin is damaged (")


def test_a_model_has_an_embedding_for_every_token():
    tokenizer = characters(alphabet="abc")  # six tokens
    model, larger = (AutoConfig.for_model(vocab_size=size, **TINY) for size in (6, 8))
    for config in (model, larger):
        check_vocabulary(config, tokenizer, "m", "critic")
    tokenizer._set_model_specific_special_tokens({"other_token": "<other>"})  # as the files of gemma-3-1b-it do
    tokenizer.add_tokens(["<other>"], special_tokens=True)
    check_vocabulary(model, tokenizer, "m", "critic")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>"]})
    check_vocabulary(larger, tokenizer, "m", "critic")
    with pytest.raises(ValueError, match=r"critic\.path=m: the model has 6 tokens .* has '<think>' with the id 7; set"):
        check_vocabulary(model, tokenizer, "m", "critic")


@pytest.mark.parametrize("key", ["actor", "reference"])
def test_a_model_with_fewer_tokens_than_the_tokenizer_is_refused_before_it_is_loaded(key, folder, tiny):
    terms = ("algorithm/terms=[kl]",) if key == "reference" else ()
    job = Job(tiny("warmup=none", *terms, f"{key}.path={folder}", f"{key}.model_config=null"))
    with pytest.raises(ValueError, match=rf"{key}\.path={folder}: the model has 19 tokens .* set actor\.tokenizer"):
        job.load(1)
        job.check.end()


def test_a_model_without_a_head_of_its_own_is_refused():
    config = AutoConfig.for_model("qwen2_5_omni")
    with pytest.raises(ValueError, match=r"^actor\.model_config: Qwen2_5Omni\w+ has no head that reads one sequence"):
        check_loadable(config, None, "lm", "actor", reads_weights=True, media=True)


@pytest.mark.parametrize("drawing", [None, Drawing()])
def test_of_a_model_that_speaks_the_part_that_reads_is_loaded(drawing, tmp_path):
    """The folder is as those of Qwen2.5-Omni are published."""
    one = family("qwen2_5_omni_thinker")
    own = one.model()
    Qwen2_5OmniConfig(thinker_config=one.config.to_dict()).save_pretrained(tmp_path)
    stored = {f"thinker.{name}": tensor for name, tensor in own.state_dict().items()}
    save_file(stored | {"talker.codec_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    path = str(tmp_path)
    config = read_config(path, None, 0, "actor")
    check_loadable(config, path, "lm", "actor", reads_weights=True, media=True)
    model = load_model(path, config, 1, drawing=drawing)
    assert type(model) is type(own)
    if drawing is not None:
        plain = empty_like(model, torch.device("cpu"))
        model.to_empty(device="cpu")
        read_weights(model, plain, path, drawing)
    assert model.state_dict().keys() == own.state_dict().keys()
    assert all(torch.equal(tensor, own.state_dict()[name]) for name, tensor in model.state_dict().items())
