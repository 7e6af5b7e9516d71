import json
import os
import weakref

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from rft.rollout.server.weights import store
from rft.rollout.server.weights.store import WeightStore


@pytest.fixture
def staged(tmp_path):
    """What a server reads in the folder of a version: all tensors of all its safetensors files."""

    def read(weights):
        found = {}
        for path in sorted(weights.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                assert not found.keys() & set(file.keys()), "a tensor is in one file alone"
                found |= {name: file.get_tensor(name) for name in file.keys()}
        return found

    return read


def model_like(changes=()):
    torch.manual_seed(0)
    tensors = {
        "embed": torch.randn(7, 3),
        "half": torch.randn(5, 3).bfloat16(),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "flag": torch.tensor([True, False]),
        "turned": torch.randn(4, 6).T,
        "odd": torch.randn(3).half(),
    }
    for name in changes:
        tensors[name] = (tensors[name].float() + 1).to(tensors[name].dtype)
    return tensors


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def written(weights):
    """The inodes of the files of a version."""
    return {path.stat().st_ino: path.name for path in weights.folder.glob("*.safetensors")}


def test_a_version_holds_what_was_given(tmp_path, staged):
    weights = WeightStore(tmp_path / "weights", None).write(0, model_like().items())
    assert weights.folder == tmp_path / "weights" / "v0"
    same(staged(weights), model_like())
    index = json.loads((weights.folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model_like().keys() and index["metadata"]["version"] == 0


def test_every_version_is_a_model_that_transformers_loads(tmp_path):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=11, num_key_value_heads=2, tie_word_embeddings=False, **sizes))
    model.config.save_pretrained(tmp_path / "skeleton")
    staged = WeightStore(tmp_path / "weights", tmp_path / "skeleton")
    weights = staged.write(4, model.state_dict().items())
    same(Qwen3ForCausalLM.from_pretrained(weights.folder).state_dict(), model.state_dict())


def test_what_does_not_change_is_written_once_more_at_most_and_then_linked(tmp_path, staged):
    weight_store = WeightStore(tmp_path / "weights", None)
    files = []
    for version in range(5):
        tensors = model_like()
        tensors["embed"] = tensors["embed"] + version  # all the others are frozen
        weights = weight_store.write(version, tensors.items())
        weight_store.keep(weights)
        same(staged(weights), tensors)
        weights.verify()
        files.append(written(weights))
        assert [path.name for path in weight_store.folder.iterdir()] == [f"v{version}"], "older versions are deleted"
    for older, newer in ((2, 3), (3, 4)):
        assert len(files[older].keys() & files[newer].keys()) == 1, "the file of all others is linked"
        assert len(files[newer]) == 2


def test_what_was_still_and_changes_after_all_is_written(tmp_path, staged):
    weight_store = WeightStore(tmp_path / "weights", None)
    for version, changes in enumerate([(), ("embed",), ("embed",), ("embed", "turned"), ("turned",), (), ("embed",)]):
        weights = weight_store.write(min(version, 5), model_like(changes).items())
        weight_store.keep(weights)
        same(staged(weights), model_like(changes))


def test_a_tensor_of_other_shape_or_type_and_the_same_bytes_is_another(tmp_path, staged):
    weight_store = WeightStore(tmp_path / "weights", None)
    for version, tensor in enumerate([torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)]):
        weights = weight_store.write(version, [("x", tensor)])
        weight_store.keep(weights)
        same(staged(weights), {"x": tensor})


def test_a_version_that_was_not_kept_is_no_base(tmp_path, staged):
    weight_store = WeightStore(tmp_path / "weights", None)
    weight_store.keep(weight_store.write(0, model_like().items()))
    weight_store.write(1, model_like(("embed",)).items())
    weights = weight_store.write(1, model_like(("turned",)).items())
    same(staged(weights), model_like(("turned",)))


def test_no_more_than_one_tensor_is_held(tmp_path):
    live, most = set(), []

    def tensors(version):
        for number in range(20):
            tensor = torch.full((1000,), float(number + version * (number % 2)))
            live.add(number)
            weakref.finalize(tensor.untyped_storage(), live.discard, number)
            most.append(len(live))
            yield f"w{number}", tensor
            del tensor

    weight_store = WeightStore(tmp_path / "weights", None)
    for version in range(3):
        weight_store.keep(weight_store.write(version, tensors(version)))
    assert max(most) == 1 and len(most) == 60


def test_a_bucket_that_is_full_begins_another_file(tmp_path, staged, monkeypatch):
    monkeypatch.setattr(store, "FILE_BYTES", 64)
    tensors = {f"layer.{number}.ü": torch.full((2,), float(number)) for number in range(30)}  # of 8 bytes
    tensors["large"] = torch.arange(20.0)
    weights = WeightStore(tmp_path / "weights", None).write(0, tensors.items())
    assert [len(names) for names in weights.files().values()] == [8, 8, 8, 6, 1]
    assert [weights.tensors[name].nbytes for name in ("layer.0.ü", "large")] == [8, 80]
    same(staged(weights), tensors)


def test_tensors_that_share_memory_are_all_written(tmp_path, staged):
    whole = torch.arange(12.0).view(3, 4)
    tensors = {"whole": whole, "rows": whole[1:], "column": whole[:, 1], "same": whole}
    weights = WeightStore(tmp_path / "weights", None).write(0, tensors.items())
    same(staged(weights), tensors)
    assert torch.equal(weights.read("column"), torch.tensor([1.0, 5.0, 9.0]))


def test_a_dtype_that_servers_do_not_read_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"^odd: servers do not read weights of torch\.complex64"):
        WeightStore(tmp_path / "weights", None).write(0, [("odd", torch.zeros(2, dtype=torch.complex64))])


def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(store.os, "fsync", fail)
    with pytest.raises(OSError, match=r"model-1-00001\.safetensors: no space left on device"):
        WeightStore(tmp_path / "weights", None).write(0, model_like().items())
    assert not (tmp_path / "weights" / "v0").exists()


def spoil(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def test_every_flipped_bit_is_found_and_the_file_named(tmp_path):
    weights = WeightStore(tmp_path / "weights", None).write(3, model_like().items())
    weights.verify()
    [path] = weights.folder.glob("*.safetensors")
    intact = path.read_bytes()
    for place in range(len(intact)):  # in the length of the header, the header, its padding, the data
        spoil(path, place)
        with pytest.raises(OSError, match=rf"{path.name} does not hold the weights of version 3"):
            weights.verify()
        path.write_bytes(intact)
    weights.verify()


def test_a_file_that_is_cut_or_gone_is_found(tmp_path):
    weights = WeightStore(tmp_path / "weights", None).write(3, model_like().items())
    path = sorted(weights.folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(OSError, match=path.name):
        weights.verify()
    path.unlink()
    with pytest.raises(OSError, match=path.name):
        weights.verify()


def test_tensors_of_wider_types_are_rounded_and_what_rounds_to_the_same_is_still(tmp_path, staged):
    weight_store = WeightStore(tmp_path / "weights", None, torch.bfloat16)
    expected = model_like() | {name: model_like()[name].bfloat16() for name in ("embed", "turned")}
    first = weight_store.write(0, model_like().items())
    same(staged(first), expected)
    assert first.dtype == torch.bfloat16
    weight_store.keep(first)
    moved = model_like() | {"embed": model_like()["embed"] * (1 + 1e-5)}
    second = weight_store.write(1, moved.items())
    assert written(second).keys() == written(first).keys() and not torch.equal(moved["embed"], expected["embed"])


def test_what_is_written_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(store.os, "fsync", lambda file: os.pwrite(file, b"x", os.fstat(file).st_size - 1))
    with pytest.raises(OSError, match=r"does not hold the weights of version 0"):
        WeightStore(tmp_path / "weights", None).write(0, model_like().items())
    assert not (tmp_path / "weights" / "v0").exists()
