"""A model folder becomes a GGUF file that transformers reads as the same model."""

import json
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rft.actor.loading.gguf import folder_of
from rft.actor.loading.gguf_facts import LLAMA3_ROPE, rope_factors
from rft.setup.assembly import Job
from tests.scripts.conversion.gguf_folders import byte_level, read, save

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import convert  # noqa: E402
from conversion.gguf import FAMILIES, _permute  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run(run_script):
    """Runs the section `to-gguf`; see `run_script`."""
    return partial(run_script, convert.main, "to-gguf")


# Weights


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), ("qwen3_moe", torch.bfloat16)]
)
def test_transformers_reads_the_same_model(family, dtype, run, tmp_path):
    save(tmp_path / "model", family, dtype=dtype)
    assert run(tmp_path / "model", "--out", tmp_path / "out.gguf", "--type", "f32")[0] == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    weights = found.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.state_dict().items())
    tokens = torch.arange(40).view(1, -1)  # logits depend on the options, too
    assert torch.equal(found(tokens).logits, expected(tokens).logits)
    assert found.config.max_position_embeddings == 128


def test_embeddings_that_differ_are_not_tied(run, tmp_path):
    model = save(tmp_path / "model", "qwen2", tie_word_embeddings=False)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert run(tmp_path / "model", "--out", tmp_path / "out.gguf", "--type", "f32")[0] == 0
    output = read(tmp_path / "out.gguf")[0]["output.weight"].data
    assert np.array_equal(output, model.lm_head.weight.detach().numpy())


def test_tied_embeddings_that_are_stored_under_the_name_of_the_head(run, tmp_path):
    model = save(tmp_path / "model", "qwen2")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    assert run(tmp_path / "model", "--out", tmp_path / "out.gguf", "--type", "f32")[0] == 0
    written = read(tmp_path / "out.gguf")[0]
    assert "output.weight" not in written
    assert np.array_equal(written["token_embd.weight"].data, model.lm_head.weight.detach().numpy())


def test_rows_of_a_llama_are_in_the_order_of_its_rotation():
    rows = torch.arange(8)  # two heads of four: row 0 turns with row 2, row 1 with row 3
    assert _permute(lambda: rows, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert _permute(lambda: torch.stack([rows, -rows], 1), 1)[:, 1].tolist() == [0, -4, -1, -5, -2, -6, -3, -7]


def test_frequencies_of_llama3_are_divided(run, tmp_path):
    rope = {
        "rope_type": "llama3", "rope_theta": 125.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = AutoConfig.for_model("llama", hidden_size=24, num_attention_heads=4, rope_parameters=rope)  # 6 a head
    length = 2 * math.pi * 5  # of the wave of the second frequency, 1/5; the others are 2 pi and 50 pi
    smooth = (64 / length - 1) / (4 - 1)
    expected = [1.0, 1 / ((1 - smooth) / 8 + smooth), 8.0]
    assert rope_factors(config).tolist() == pytest.approx(expected, rel=1e-6)
    save(tmp_path / "model", rope_parameters=rope)
    assert run(tmp_path / "model", "--out", tmp_path / "out.gguf") == (0, "")
    factors = read(tmp_path / "out.gguf")[0]["rope_freqs.weight"]
    assert factors.data.shape == (4,) and factors.tensor_type.name == "F32"


def test_a_run_reads_the_rotation_of_llama3(run, tmp_path):
    """The file has factors alone; those of Llama 3.1 and 3.2 differ in the largest."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, **LLAMA3_ROPE}
    model = save(tmp_path / "model", rope_parameters=rope)
    assert run(tmp_path / "model", "--out", tmp_path / "out.gguf", "--type", "f32") == (0, "")
    read_file = partial(folder_of, dtype="float32", cache=str(tmp_path), key="actor.path", tell=lambda line: None)
    found = AutoModelForCausalLM.from_pretrained(read_file(str(tmp_path / "out.gguf")))
    assert found.config.rope_parameters == rope
    tokens = torch.arange(100).view(1, -1)
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    save(tmp_path / "other", rope_parameters=rope | {"high_freq_factor": 3.0})
    assert run(tmp_path / "other", "--out", tmp_path / "other.gguf")[0] == 0
    with pytest.raises(ValueError, match=r"scaled in another way than that of Llama 3\); name the"):
        read_file(str(tmp_path / "other.gguf"))


@pytest.mark.parametrize(("kind", "tied"), [*((kind, False) for kind in convert.GGUF_TYPES), ("q4_1", True)])
def test_types(kind, tied, run, tmp_path):
    model = save(tmp_path / "model", "qwen3_moe", tie_word_embeddings=tied, moe_intermediate_size=48)
    code, said = run(tmp_path / "model", "--out", tmp_path / "out.gguf", "--type", kind)
    tensors, fields = read(tmp_path / "out.gguf")
    types = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    few, blocks = kind[:2] in ("q4", "q5"), kind.startswith("q")
    expected = dict.fromkeys(types, kind.upper())
    for name in types:
        if "norm" in name or name == "blk.0.ffn_gate_inp.weight":
            expected[name] = "F32"
        elif name == "blk.0.ffn_down_exps.weight" and blocks:  # rows of 48
            expected[name] = "F16"
    output = "token_embd.weight" if tied else "output.weight"
    expected[output] = "Q8_0" if few else kind.upper()
    assert types == expected and ("output.weight" in types) is not tied
    note = "note: rows of blk.0.ffn_down_exps.weight are no multiple of 32 and are written in f16\n"
    assert (code, said) == (0, note if blocks else "")
    assert fields["general.file_type"] == {
        "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "bf16": 32
    }[kind]  # fmt: skip
    experts = model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"]
    for name, exact in (("gate", experts[:, :48]), ("up", experts[:, 48:])):
        tensor = tensors[f"blk.0.ffn_{name}_exps.weight"]
        error = np.abs(dequantize(tensor.data, tensor.tensor_type) - exact.numpy())
        largest = np.abs(exact.numpy()).max(-1, keepdims=True)  # a row is one block of 32
        # half a step, and the rounding of the scale to float16; a step is at most this part of the largest number
        steps = {"f32": 0.0, "f16": 2**-10, "bf16": 2**-7, "q8_0": 1 / 127}.get(kind, 2 / (15 if "4" in kind else 31))
        assert (error <= largest * steps * (1.2 if few else 0.6)).all()


def test_numbers_that_a_type_cannot_hold(run, tmp_path):
    model = save(tmp_path / "model")
    model.model.layers[0].mlp.up_proj.weight.data[3, 4] = 70000.0
    model.save_pretrained(tmp_path / "model")
    code, error = run(tmp_path / "model", "--out", tmp_path / "out.gguf", "--type", "f16")
    assert (
        code == 1 and "blk.0.ffn_up.weight has a number of 70000.0, and numbers up to 65504 are written in f16" in error
    )
    assert not (tmp_path / "out.gguf").exists()
    assert run(tmp_path / "model", "--out", tmp_path / "out.gguf", "--type", "bf16") == (0, "")
    model.model.norm.weight.data[0] = math.nan
    model.save_pretrained(tmp_path / "model")
    code, error = run(tmp_path / "model", "--out", tmp_path / "nan.gguf", "--type", "f32")
    assert code == 1 and "output_norm.weight has a number of nan" in error


# Folders


def unending(folder):
    tokenizer = byte_level()
    tokenizer.eos_token = None
    save(folder, tokenizer=tokenizer)


def without(*names):
    """A model folder without some files."""

    def make(folder):
        save(folder)
        for name in names:
            (folder / name).unlink()

    return make


def smaller(folder):
    save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))


def scorer(folder):
    save(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForSequenceClassification"]}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without("config.json"), "has no config.json; name a model folder: the actor/ of a checkpoint, or what"),
        (without("model.safetensors"), "has no weights (*.safetensors), or quantized ones"),
        (without("tokenizer.json", "tokenizer_config.json"), "no tokenizer can be read"),
        (smaller, "the weights lack model.layers.1."),
        (scorer, "config.json has the architecture LlamaForSequenceClassification; only causal language models"),
        (unending, "the tokenizer has no eos_token; name the one that ends a text in its config"),
        (
            partial(save, family="llama", attention_bias=True),
            "has attention_bias=True, and llama.cpp computes with False",
        ),
        (partial(save, family="qwen3_moe", norm_topk_prob=False), "has norm_topk_prob=False"),
        (partial(save, family="mistral", sliding_window=64), "set max_position_embeddings=64 there if no text is"),
        (partial(save, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), "rope_type=linear"),
    ],
)
def test_a_folder_that_becomes_no_file(make, message, run, tmp_path):
    make(tmp_path / "model")
    code, error = run(tmp_path / "model", "--out", tmp_path / "out.gguf")
    assert code == 1 and error.startswith(f"error: {tmp_path / 'model'}") and message in error
    assert not (tmp_path / "out.gguf").exists()


def test_a_window_that_no_text_passes_is_written(run, tmp_path):
    save(tmp_path / "model", "mistral", sliding_window=128)
    assert run(tmp_path / "model", "--out", tmp_path / "out.gguf") == (0, "")


def test_other_families_are_refused_by_name(run, tmp_path):
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=300)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    code, error = run(tmp_path / "model", "--out", tmp_path / "out.gguf")
    families = "llama, mistral, qwen2, qwen3, qwen3_moe"
    assert code == 1 and f"has model_type=gpt2; GGUF files are written for {families}" in error


def test_a_file_is_not_overwritten_and_a_missing_package_is_named(run, tmp_path, monkeypatch):
    save(tmp_path / "model")
    file = tmp_path / "new" / "out.gguf"
    assert run(tmp_path / "model", "--out", file) == (0, "")
    assert run(tmp_path / "model", "--out", file) == (1, f"error: {file} exists; name a file that does not\n")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "conversion.gguf")
    monkeypatch.delitem(sys.modules, "conversion.gguf_tokenizer")
    code, error = run(tmp_path / "model", "--out", tmp_path / "other.gguf")
    assert (code, error) == (1, "error: to-gguf needs the package gguf: pip install 'rft[gguf]'\n")


@pytest.mark.slow
def test_the_policy_of_a_run_becomes_a_file(run, tiny, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": "1 + 2 = 3, and 12 + 30 = 42."}) + "\n")
    tokenizer = {"_target_": "rft.data.encode.tokenizer.bpe", "files": [str(rows)], "fields": ["text"]}
    config = tiny(
        "warmup=none", "steps=1", "eval.every=0", "actor.model_config.model_type=llama", "data.template=turns"
    )
    Job(config | {"actor": config["actor"] | {"tokenizer": tokenizer | {"vocab_size": 280}}}).fit("")
    actor = tmp_path / "run" / "checkpoints" / "latest" / "actor"
    assert run(actor, "--out", tmp_path / "out.gguf", "--type", "f32") == (0, "")
    assert read(tmp_path / "out.gguf")[1]["tokenizer.ggml.pre"] == "smollm"
    expected = AutoModelForCausalLM.from_pretrained(actor)
    found = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="out.gguf", dtype=torch.float32)
    tokens = torch.tensor([AutoTokenizer.from_pretrained(actor)("1 + 2 =").input_ids])
    assert torch.equal(found(tokens).logits, expected(tokens).logits)
