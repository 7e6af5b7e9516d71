"""Each rank reads or draws its own shards of a model, bit by bit what `from_pretrained` or `from_config` makes."""

import json
from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from rft.actor.init import load_model, load_with_head, read_config
from rft.actor.loading.deferred_init import Drawing
from rft.actor.loading.stored import StoredWeights, find_files, open_tensors
from rft.distributed import start
from tests.actor.loading.stored_on_ranks import CASES, MODELS, PEAKS, SPLIT, perform
from tests.helpers import MODEL

VOCABULARY = {"large": 4000}  # of the others: that of the tests' tokenizer
EMBEDDING = 4 * 4000 * MODELS["large"]["hidden_size"]  # bytes of the largest tensor of "large"
ADAPTER = 8 * 4 * 4 * 3 * (256 + 256)  # at most: of 8 blocks 4 layers, A (3, 256) and B (256, 3)
MATRIX = 4 * 256 * 1024  # the largest of a new model, whose vocabulary is that of the tests' tokenizer
SMALL = 64 * 2**10  # bytes of what is not a weight, such as buffers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models in several files each, as the hub has them, with a generation config; adapters; files of torch.save."""
    folder = tmp_path_factory.mktemp("models")
    for name, options in MODELS.items():
        model = load_model(None, read_config(None, options, VOCABULARY.get(name, 19), "actor"), 3)
        model.generation_config.update(temperature=0.5, do_sample=True)
        model.save_pretrained(folder / name, max_shard_size="8MB" if name == "large" else "6KB")
        assert len(list((folder / name).glob("*.safetensors"))) > 2
        beside = {"qwen3": "", "large": "large "}
        if name in beside:
            save_adapter(model, folder / name, folder / f"{beside[name]}adapter")
            save_pickled(model, folder / f"{beside[name]}pickled")
    return folder


def save_adapter(model, base, folder):
    """An adapter of random numbers, as peft saves it."""
    config = LoraConfig(r=3, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(deepcopy(model), config)
    for weight in (weight for weight in model.parameters() if weight.requires_grad):
        weight.data.normal_()
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)


def save_pickled(model, folder):
    """The weights in two files of torch.save with an index, as older folders of the hub have them."""
    folder.mkdir()
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    files = {name: f"pytorch_model-{1 + ('lm_head' in name)}.bin" for name in model.state_dict()}
    for file in sorted(set(files.values())):
        torch.save({name: model.state_dict()[name] for name in files if files[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.fixture(scope="module")
def one_rank(folder):
    torch.set_num_threads(1)
    return perform(start("cpu"), folder)


@pytest.fixture(scope="module")
def two_ranks(torchrun, folder, tmp_path_factory):
    results = tmp_path_factory.mktemp("stored") / "results.pt"
    torchrun("tests/actor/loading/stored_on_ranks.py", folder, results)
    return torch.load(results, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_rank_has_what_transformers_makes(one_rank, name):
    assert one_rank["differences"][name] == [[]]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES | SPLIT)
def test_two_ranks_have_what_transformers_makes(two_ranks, name):
    assert two_ranks["differences"][name] == [[], []]


@pytest.mark.slow
def test_a_head_that_no_file_holds_is_the_same_on_one_rank_and_on_two(one_rank, two_ranks):
    assert one_rank["score"].any() and torch.equal(one_rank["score"], two_ranks["score"])


@pytest.mark.slow
def test_a_rank_holds_its_shard_and_one_tensor_while_it_loads(one_rank, two_ranks):
    """The counter sees a tensor of a file as a whole, although a rank reads a slice of its mapped memory alone."""
    peaks = {name: (*one_rank["peaks"][name], *two_ranks["peaks"][name]) for name in PEAKS}
    whole = one_rank["peaks"]["large"][0][0]
    assert whole > 2**25
    for shard, peak in (*peaks["large"], *peaks["nf4"]):
        assert shard + EMBEDDING <= peak <= shard + EMBEDDING + SMALL
    for shard, peak in peaks["adapter"]:
        assert shard + EMBEDDING <= peak <= shard + EMBEDDING + ADAPTER + SMALL
    for shard, peak in peaks["pickled"]:
        assert peak <= shard + whole + SMALL, "beside the shard there is the mapped file alone"
    assert 4 * peaks["nf4"][0][0] < whole
    for shard, peak in peaks["drawn"]:
        assert shard + MATRIX <= peak <= shard + MATRIX + SMALL
    for shard, _ in two_ranks["peaks"]["large"]:
        assert shard == whole / 2
    for _, peak in two_ranks["peaks"]["whole"]:
        assert peak > whole


def on_meta(folder, **options):
    config = AutoConfig.from_pretrained(folder)
    return load_model(str(folder), config, 0, drawing=Drawing(), **options)


def meta_names(model):
    return {name for name, parameter in model.named_parameters() if parameter.is_meta}


def save(folder, tensors):
    """Replaces the weights of a folder by one file."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def saved(tmp_path):
    """Makes the folder of a model in one file, and its tensors."""

    def make(**options):
        model = load_model(None, read_config(None, MODEL | options, 19, "actor"), 3)
        model.save_pretrained(tmp_path)
        return tmp_path, load_file(tmp_path / "model.safetensors")

    return make


def test_parameters_wait_on_the_meta_device_and_buffers_are_computed(saved):
    folder, _ = saved()
    model, whole = on_meta(folder), load_model(str(folder), AutoConfig.from_pretrained(folder), 0)
    assert meta_names(model) == {name for name, _ in whole.named_parameters()}
    buffers = dict(model.named_buffers())
    assert buffers and all(torch.equal(buffers[name], buffer) for name, buffer in whole.named_buffers())


def test_a_missing_head_is_drawn_and_the_rest_waits(saved):
    folder, _ = saved()
    config = AutoConfig.from_pretrained(folder)
    model = load_with_head(str(folder), config, 5, 0, "score", "actor", drawing=Drawing())
    whole = load_with_head(str(folder), config, 5, 0, "score", "actor")
    assert meta_names(model) == {name for name, _ in whole.named_parameters()} - {"score.weight"}
    assert torch.equal(model.score.weight, whole.score.weight)


def test_lacking_weights_are_named(saved):
    folder, tensors = saved()
    save(folder, {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name})
    with pytest.raises(ValueError, match=r"the weights lack model\.layers\.1\.mlp\.up_proj\.weight; copy the whole"):
        on_meta(folder)


def test_a_lacking_head_is_needed_by_a_language_model_alone(saved):
    folder, tensors = saved()
    save(folder, {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"the weights lack lm_head\.weight"):
        on_meta(folder)
    assert "lm_head.weight" not in meta_names(on_meta(folder, headed=False))


def test_a_tensor_of_another_shape_is_named(saved):
    folder, tensors = saved()
    save(folder, tensors | {"model.norm.weight": torch.ones(21)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight has the shape \[21\], but the model needs \[20\]"):
        on_meta(folder)


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_is_stored_under_either_name(saved, kept):
    folder, tensors = saved(tie_word_embeddings=True)
    embedding = tensors.pop("model.embed_tokens.weight")
    save(folder, tensors | {kept: embedding})
    model = on_meta(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.lm_head.weight.is_meta


@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_that_differ_in_the_file_are_left_to_transformers(saved, same):
    folder, tensors = saved(tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]
    save(folder, tensors | {"lm_head.weight": embedding.clone() if same else -embedding})
    model = on_meta(folder)
    assert bool(meta_names(model)) == same
    assert same or torch.equal(model.lm_head.weight, -model.model.embed_tokens.weight)


@pytest.mark.parametrize("mapped", [True, False])
def test_old_files_that_cannot_be_mapped_are_left_to_transformers(saved, mapped):
    folder, tensors = saved()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=mapped)
    model = on_meta(folder)
    assert bool(meta_names(model)) == mapped
    assert mapped or torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_experts_are_merged_by_the_converters_of_transformers(folder):
    config = AutoConfig.from_pretrained(folder / "experts")
    model = load_model(str(folder / "experts"), config, 0)
    expected = model.state_dict()
    with open_tensors(find_files(str(folder / "experts"), config)) as tensors:
        weights = StoredWeights(model, tensors)
        assert len(tensors) > len(weights.shapes) and not weights.missing()
        read = {name: tensor[tuple(slice(None) for _ in expected[name].shape)] for name, tensor in weights.items()}
    assert read.keys() == expected.keys() == weights.shapes.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
