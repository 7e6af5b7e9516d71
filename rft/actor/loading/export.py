"""Writes a model in the layout of Hugging Face, file by file: the process that writes never holds all of it.

`save_pretrained` of transformers takes a whole state dict. Here the tensors come one at a time, in the order of the
model. Those of a block are renamed and split by transformers' own converters (the experts of a layer are one tensor in
the model, and many in its files), and are held until their file is full.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import build_glob_alternation, revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from rft.actor.init import blocks
from rft.actor.loading.tensor_names import checkpoint_names, renamed

FILE_BYTES = 2**30  # of a file, or those of its only tensor


def exported(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors of a model that its files hold, on the meta device; of tied ones the one that transformers keeps.

    Args:
        model: its weights are not read.
        dtype: see `write_model`.
    """
    whole = _kept_in_float32(model, dtype)
    tensors = {
        name: torch.empty(tensor.shape, dtype=_in_file(name, tensor, dtype, whole), device="meta")
        for name, tensor in model.state_dict().items()
        if name not in (model._keys_to_ignore_on_save or ())
    }
    return remove_tied_weights_from_state_dict(tensors, model)


def file_layout(model: PreTrainedModel, dtype: torch.dtype) -> StateDictSplit:
    """The files of a model, and the names of the tensors in each; see `exported`."""
    stored = dict(_as_stored(model, exported(model, dtype).items()))
    return split_torch_state_dict_into_shards(
        stored, filename_pattern="model{suffix}.safetensors", max_shard_size=FILE_BYTES
    )


def fill_files(
    model: PreTrainedModel, layout: StateDictSplit, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The names of files and their tensors, on the CPU. Memory: one file and one block, if the caller keeps none.

    A tensor that is larger than a file has one of its own, also if the file before it is continued behind it: then that
    is held meanwhile.

    Args:
        layout: see `file_layout`.
        tensors: those of `exported`, in its order.
        dtype: see `write_model`.
    """
    held: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _as_stored(model, _on_cpu(model, tensors, dtype)):
        file = layout.tensor_to_filename[name]
        held.setdefault(file, {})[name] = tensor
        del tensor  # before the caller is done with the file
        if len(held[file]) == len(layout.filename_to_tensors[file]):
            yield file, held.pop(file)
    assert not held, f"tensors that are not there: {sorted(held)}"


def write_model(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype
) -> None:
    """Writes a folder that `from_pretrained` loads.

    Args:
        model: the structure and the configs; its weights are not read.
        tensors: those of `exported`, in its order.
        dtype: of floating-point tensors in the files, and in the config. Tensors that transformers always loads in
            float32 stay in float32.

    Raises:
        OSError, SafetensorError: a file cannot be written.
    """
    if model._auto_class is not None:  # of a trusted folder: its python files, and auto_map in the config
        custom_object_save(model, folder, config=model.config)
    _set_dtype(model.config, str(dtype).removeprefix("torch."))
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    layout = file_layout(model, dtype)
    for file, held in fill_files(model, layout, tensors, dtype):
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / file, {"format": "pt"})
        del held  # before the next file is filled
    if layout.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **layout.metadata}
        _write_json({"metadata": metadata, "weight_map": layout.tensor_to_filename}, folder / SAFE_WEIGHTS_INDEX_NAME)


def add_to_config(entries: Mapping[str, float], folder: Path) -> None:
    """Adds entries to config.json of an exported model."""
    file = folder / CONFIG_NAME
    config = json.loads(file.read_text(encoding="utf-8")) | entries
    _write_json(config, file)


def _as_stored(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a model under the names and in the parts that its files hold, one block after another.

    The names are those of the files that the model was read from; for a new model those of published checkpoints.
    """
    if "_weight_conversions" not in vars(model) and (published := checkpoint_names(model)):
        yield from renamed(tensors, published)
        return
    inside = {id(block) for block in blocks(model)}
    names = [f"{name}." for name, module in model.named_modules() if id(module) in inside]

    def block(tensor: str) -> str:
        return next((name for name in names if tensor.startswith(name)), tensor)

    left = iter(tensors)
    for _, members in groupby(exported(model), block):
        yield from revert_weight_conversion(model, dict(islice(left, len(list(members))))).items()


def _on_cpu(
    model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    whole = _kept_in_float32(model, dtype)
    for name, tensor in tensors:
        yield name, tensor.to("cpu", _in_file(name, tensor, dtype, whole))
        del tensor  # before the next one is gathered


def _kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """Matches the names of the tensors that transformers loads in float32 from files of this dtype."""
    names = list(model._get_dtype_plan(dtype))
    return build_glob_alternation(names)[0] if names else re.compile("(?!)")


def _in_file(name: str, tensor: Tensor, dtype: torch.dtype, whole: re.Pattern[str]) -> torch.dtype:
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if whole.search(name) else dtype


def _set_dtype(config: PretrainedConfig, dtype: str) -> None:
    """Writes the dtype into a config and those of its parts."""
    config.dtype = dtype
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            _set_dtype(part, dtype)


def _write_json(entries: Mapping[str, Any], file: Path) -> None:
    file.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
