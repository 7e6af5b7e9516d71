"""A sharded model is exported file by file, bit by bit as `save_pretrained` of transformers writes the whole one."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

from rft.actor.init import meta_model
from rft.actor.loading import export
from rft.actor.loading.export import exported, file_layout, fill_files, write_model
from rft.actor.loading.tensor_names import checkpoint_names
from tests.actor.loading.export_on_ranks import CASES, FILE_BYTES, SPLIT, perform
from tests.families import family
from tests.helpers import MODEL, small_actor

CONVERTED = ("experts",)  # whose tensors transformers orders by their names before it fills files


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            export, "FILE_BYTES", FILE_BYTES
        )  # `perform` sets it, and other tests of this process must not see that
        return perform(world, tmp_path_factory.mktemp("exports"))


@pytest.fixture(scope="module")
def two_ranks(torchrun, tmp_path_factory):
    results = tmp_path_factory.mktemp("exported") / "results.pt"
    torchrun("tests/actor/loading/export_on_ranks.py", results)
    return torch.load(results, weights_only=True)


def check(found, name):
    sharded, whole = found["sharded"], found["whole"]
    assert sharded["names"] == whole["names"]
    for key, tensor in whole["tensors"].items():
        assert tensor.dtype == sharded["tensors"][key].dtype and torch.equal(tensor, sharded["tensors"][key]), key
    one = CASES.get(name, {}).get("file_bytes", FILE_BYTES) > FILE_BYTES
    assert (list(sharded["files"]) == ["model.safetensors"]) == one
    if name in CONVERTED:
        for texts in (sharded["texts"], whole["texts"]):
            index = json.loads(texts.pop("model.safetensors.index.json"))
            assert set(index["weight_map"]) == set(sharded["names"])
    else:
        assert sharded["files"] == whole["files"]
    assert sharded["texts"] == whole["texts"]
    for names, size in zip(sharded["files"].values(), sharded["bytes"], strict=True):
        assert size <= FILE_BYTES or len(names) == 1 or one


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_rank_writes_what_save_pretrained_writes(one_rank, name):
    check(one_rank[name], name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | SPLIT)
def test_two_ranks_write_what_save_pretrained_writes(two_ranks, name):
    check(two_ranks[name], name)


@pytest.mark.slow
def test_a_full_disk_of_rank_zero_leaves_no_rank_waiting(two_ranks):
    assert two_ranks["errors"][0] in ("SafetensorError", "IsADirectoryError")
    assert set(two_ranks["errors"][1:]) == {""}


def test_files_of_a_small_model_are_loaded_by_transformers(world, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE_BYTES", FILE_BYTES)
    actor = small_actor(world, tie_word_embeddings=True)
    actor.save_model(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {file.name for file in tmp_path.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and f"model-00001-of-{len(files):05d}.safetensors" in files
    loaded, expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), dict(actor.weights())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava", "gemma3", "qwen2_audio", "qwen2_5_omni_thinker"])
def test_a_new_model_has_the_names_of_published_checkpoints(name, tmp_path):
    """Those that engines know; transformers loads them."""
    model = family(name).model()
    write_model(model, ((key, model.state_dict()[key]) for key in exported(model)), tmp_path, torch.float32)
    published = checkpoint_names(model)
    assert set(load_file(tmp_path / "model.safetensors")) == {published[key] for key in exported(model)}
    loaded = AutoModelForMultimodalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in model.state_dict().items())


def test_no_tensor_is_read_before_its_block_is_due(world, monkeypatch):
    """The next file and the block behind it are not gathered while a file is held."""
    monkeypatch.setattr(export, "FILE_BYTES", FILE_BYTES)
    model, read = small_actor(world).plain_model(), []

    def tensors():
        for name, tensor in exported(model).items():
            read.append(name)
            yield name, torch.zeros(tensor.shape)

    layout = file_layout(model, torch.float32)
    seen = 0
    for _, held in fill_files(model, layout, tensors(), torch.float32):
        seen += len(held)
        ahead = read[seen:]
        assert all(name.startswith(read[seen - 1].rpartition("layers.")[0]) for name in ahead)
        assert len({name.split(".")[2] for name in ahead}) <= 1
        del held
    assert seen == len(exported(model)) and layout.is_sharded


@pytest.mark.parametrize("large", [{"vocab_size": 200}, {"intermediate_size": 80}])
def test_a_tensor_that_is_larger_than_a_file_has_one_of_its_own(monkeypatch, large):
    """It comes after the beginning of a file that ends before it, such as the head, or behind it."""
    monkeypatch.setattr(export, "FILE_BYTES", FILE_BYTES)
    model = meta_model(AutoConfig.for_model(**{"vocab_size": 19} | MODEL | large))
    layout, files = file_layout(model, torch.float32), {}
    tensors = ((name, torch.zeros(tensor.shape)) for name, tensor in exported(model).items())
    for file, held in fill_files(model, layout, tensors, torch.float32):
        files[file] = list(held)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= FILE_BYTES
    assert files == layout.filename_to_tensors
