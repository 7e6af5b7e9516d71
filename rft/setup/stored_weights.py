"""Checks that the weights of a model which `path` names are there, and fit its config. Messages name the key."""

import json
import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.loading.tensor_names import inner_prefix
from rft.actor.lora.base import find_adapter
from rft.errors import listed

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


def check_stored(
    path: str, model: PreTrainedModel | None, config: PretrainedConfig, head: str, where: str, reads_weights: bool
) -> None:
    """Checks the weights of a folder, or an adapter and those of its base.

    Args:
        path: a folder or hub name. Only the weights of a folder are checked.
        model: on the meta device; None for a classifier.
        config: of the model.
        head: of the actor.
        where: begins messages.
        reads_weights: a folder must have weights.

    Raises:
        ValueError: weights are missing or damaged, or do not fit.
    """
    if (adapter := find_adapter(path)) is not None:
        if model is not None:
            adapter.check(model)
        path = adapter.base
    if Path(path).is_dir() and (reads_weights or any(Path(path).glob("*.safetensors"))):
        _check_weights(Path(path), None if "quantization_config" in vars(config) else model, where, head)


def _check_weights(folder: Path, model: PreTrainedModel | None, where: str, head: str) -> None:
    """Raises a ValueError if weights of a folder are missing or damaged, or of other shapes than those of the model."""
    files = sorted(folder.glob("*.safetensors"))
    indexed = [index for index in (f"{SAFE}.index.json", f"{PICKLED}.index.json") if (folder / index).is_file()]
    if indexed:
        _check_index(folder, indexed[0], where)
    files = files or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ValueError(f"{where}: the folder has no weights (*.safetensors); copy them there, or name another")
    expected = {} if model is None else {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    stored: set[str] = set()
    for file in files:
        try:
            shapes = _stored_shapes(file)
        except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            refused = isinstance(error, UnpicklingError)  # torch advises to unpickle it unsafely
            reason = "torch.load cannot read it" if refused or not str(error) else str(error).splitlines()[0]
            raise ValueError(f"{where}: {file.name} is damaged ({reason}); copy it there again") from error
        for name in sorted(shapes.keys() & expected.keys()):
            if shapes[name] != expected[name]:
                raise ValueError(
                    f"{where}: {name} in {file.name} has the shape {shapes[name]}, but config.json needs "
                    f"{expected[name]}; one of the two belongs to another model"
                )
        stored |= shapes.keys()
    if model is not None and stored <= expected.keys():  # transformers renames other weights while it loads them
        tensors = model.state_dict(keep_vars=True)
        loaded = {id(tensors[name]) for name in stored}  # tied weights are one tensor
        needed = "" if head == "lm" else inner_prefix(model)
        lacking = [name for name, tensor in tensors.items() if id(tensor) not in loaded and name.startswith(needed)]
        if lacking:
            raise ValueError(f"{where}: the weights lack {listed(lacking)}; copy the whole model there")


def _check_index(folder: Path, index: str, where: str) -> None:
    """Raises a ValueError if an index cannot be read, or names a file that is not there."""
    try:
        named = set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {index} cannot be read ({error}); copy it there again") from error
    if missing := sorted(name for name in named if not (folder / name).is_file()):
        raise ValueError(f"{where}: {index} names {missing[0]}, which is not in the folder; copy it there")


def _stored_shapes(file: Path) -> dict[str, list[int]]:
    """The shapes of the tensors in a file, whose numbers are not read."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}
    stored = torch.load(file, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(file))
    return {name: list(tensor.shape) for name, tensor in stored.items()}
