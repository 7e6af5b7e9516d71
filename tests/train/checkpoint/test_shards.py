"""Tensors of a checkpoint in files."""

import torch
import torch.distributed as dist

from rft.distributed import start
from rft.train.checkpoint import shards
from rft.train.checkpoint.shards import file_numbers, largest_file, load_tensors, save_tensors


def test_files_are_filled_one_after_another(monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 40)
    sizes = {"a": 5, "b": 5, "c": 1, "large": 30, "d": 9, "e": 1, "f": 1}  # float32: 4 bytes each
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    assert file_numbers(tensors, 1) == {"a": 1, "b": 1, "c": 2, "large": 3, "d": 4, "e": 4, "f": 5}
    assert max(file_numbers(tensors, 2).values()) == 3
    assert (largest_file(tensors, 1), largest_file(tensors, 2), largest_file({}, 1)) == (120, 60, 0)


def test_tensors_of_several_files_are_read(tmp_path, monkeypatch):
    start("cpu")
    monkeypatch.setattr(shards, "FILE_BYTES", 40)
    tensors = {f"part/{number}": torch.arange(number, number + 7.0) for number in range(5)}
    tensors |= {
        "empty": torch.empty(0, 3),
        "half": torch.tensor([0.1, 2.0]).bfloat16(),
        "bytes": torch.arange(9).byte(),
    }
    save_tensors(tensors, tmp_path, dist.group.WORLD)
    assert len(list(tmp_path.glob("*.safetensors"))) == 6
    found = {name: torch.full_like(tensor, 99) for name, tensor in tensors.items()}
    load_tensors(found, tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
