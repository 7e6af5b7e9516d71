"""Reads the weights of a model from its files, so that each rank reads its own shards alone.

`from_pretrained` of transformers makes the whole model in each process. Here the model stands on the meta device until
its strategy has sharded it; then each shard is read from the files, one tensor after another. transformers renames the
tensors of a checkpoint, and merges or splits some of them (the experts of a layer are one tensor); its own converters
do so here, for one target after another. Only such a group, and a weight that is packed into 4 bits, is read whole.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from rft.actor.loading.tensor_names import inner_prefix

SAFE = ".safetensors"
STORED = ("quantization_config", "transformers_weights")  # keys of a config: `from_pretrained` has to read the model
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by their names in safetensors
COMPARED = 2**24  # numbers of two tensors that are compared at a time


class PackedLayer(nn.Module):
    """A layer whose parameter `weight` is a packed matrix.

    Attributes:
        shape: of the matrix.
    """

    shape: torch.Size
    weight: nn.Parameter

    def pack(self, weight: Tensor) -> Tensor:
        """What the parameter holds of a whole matrix."""
        raise NotImplementedError


def needs_transformers(config: PretrainedConfig) -> bool:
    """`from_pretrained` has to read the model: it is stored quantized or in files of other names."""
    return not {*STORED}.isdisjoint(vars(config))


def find_files(path: str, config: PretrainedConfig) -> list[str]:
    """The files of the weights of a folder or hub name: safetensors, or else pytorch_model.bin.

    None where `from_pretrained` has to read the model. It also has to read files that torch wrote before 1.6, which
    cannot be mapped into memory.
    """
    if needs_transformers(config):
        return []
    find = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        found = find(single)
        files = [found] if found is not None else []
        if not files and (found := find(index)) is not None:
            files = get_checkpoint_shard_files(path, found)[0]
        if files:
            return files if all(file.endswith(SAFE) or is_zipfile(file) for file in files) else []
    return []


@contextmanager
def open_tensors(files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The tensors of files by their keys. Numbers are read where one of them is indexed."""
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in files:
            if file.endswith(SAFE):
                opened = stack.enter_context(safe_open(file, "pt"))
                tensors |= {key: opened.get_slice(key) for key in opened.keys()}
            else:
                mapped = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
                tensors |= {key: MappedTensor(tensor) for key, tensor in mapped.items()}
        yield tensors


class MappedTensor:
    """A tensor of a file that torch maps into memory, with the methods of the slices of safetensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Its sizes."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """Its dtype, by the name that safetensors has for it."""
        return next((name for name, dtype in DTYPES.items() if dtype == self._tensor.dtype), str(self._tensor.dtype))

    def __getitem__(self, region: Any) -> Tensor:
        return self._tensor[region]


class StoredWeights:
    """The tensors of a checkpoint under the names that they have in a model.

    Args:
        model: decides the names; its own tensors are not read.
        tensors: see `open_tensors`.

    Attributes:
        shapes: of the tensors of the model that the checkpoint holds.
    """

    def __init__(self, model: PreTrainedModel, tensors: Mapping[str, Any]) -> None:
        self._model = model
        self._tensors = tensors
        self._keys: dict[str, str] = {}  # of tensors that are stored as they are in the model, by their names there
        self._groups: dict[str, tuple[WeightConverter, list[tuple[str, str]]]] = {}  # by the first name that they make
        transforms = get_model_conversion_mapping(model)
        self._match(transforms)
        model._weight_conversions = [transform for transform in transforms if transform.was_used()]  # for its export
        self.shapes = {name: list(tensors[key].get_shape()) for name, key in self._keys.items()}
        self._group_of: dict[str, str] = {}  # by the names of tensors that a converter makes
        for name in self._groups:
            made = {target: list(tensor.shape) for target, tensor in self._convert(name, self._outline)}
            self.shapes |= made
            self._group_of |= dict.fromkeys(made, name)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Names, and tensors of which only what is indexed is read; those that a converter makes are whole."""
        for name, key in self._keys.items():
            yield name, self._tensors[key]
        for name in self._groups:
            yield from self._convert(name, self._whole)

    def __getitem__(self, name: str) -> Any:
        """The tensor of one name of `shapes`; see `items`."""
        if name in self._keys:
            return self._tensors[self._keys[name]]
        return dict(self._convert(self._group_of[name], self._whole))[name]

    def missing(self) -> set[str]:
        """The names of the model's tensors that the checkpoint does not hold, under any name of a tied one."""
        tensors = self._model.state_dict(keep_vars=True)
        stored = {id(tensors[name]) for name in self.shapes if name in tensors}
        return {name for name, tensor in tensors.items() if id(tensor) not in stored}

    def ties_differ(self) -> bool:
        """The checkpoint holds two different tensors for a weight that the config ties. transformers unties them."""
        tensors, first = self._model.state_dict(keep_vars=True), dict[int, str]()
        for name in (name for name in self._keys if name in tensors):
            other = first.setdefault(id(tensors[name]), name)
            if other != name and not _same(*(self._tensors[self._keys[tied]] for tied in (other, name))):
                return True
        return False

    def _match(self, transforms: Sequence[Any]) -> None:
        """Finds the place of each tensor, as `convert_and_load_state_dict_in_model` of transformers does."""
        expected, prefix = self._model.state_dict(), type(self._model).base_model_prefix  # that of the files
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        for key in sorted(self._tensors, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
            if name not in expected and key in expected:
                name, pattern = rename_source_key(key, [], [], prefix, expected)
            if name in expected and pattern is None:
                self._keys.setdefault(name, key)
            elif name in expected:
                self._groups.setdefault(name, (by_pattern[pattern], []))[1].append((pattern, key))

    def _convert(self, name: str, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        converter, members = self._groups[name]
        converter = deepcopy(converter)
        for pattern, key in members:
            converter.add_tensor(name, key, pattern, partial(read, key))
        made = converter.convert(name, model=self._model, config=self._model.config)
        for target, tensor in made.items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor

    def _whole(self, key: str) -> Tensor:
        tensor: Tensor = self._tensors[key][...].float()
        return tensor

    def _outline(self, key: str) -> Tensor:
        return torch.empty(self._tensors[key].get_shape(), device="meta")


@dataclass(frozen=True)
class LazyTensor:
    """Stands for a tensor whose numbers are made where it is indexed by a slice of each dimension.

    Attributes:
        read: makes the numbers of a region.
    """

    read: Callable[[Any], Tensor]

    def __getitem__(self, region: Any) -> Tensor:
        return self.read(region)


def unread(shape: Sequence[int]) -> LazyTensor:
    """A stored tensor in `mode=plan`: memory for all of it, without numbers, as if it were float32.

    A file is mapped into memory, so that the pages that a rank reads of a tensor are in memory.
    """
    return LazyTensor(lambda region: torch.empty(tuple(shape))[region])


def initialize(model: PreTrainedModel, missing: set[str]) -> None:
    """Gives numbers to what no file holds, on the CPU, as `from_pretrained` does: buffers are computed, weights drawn.

    Args:
        model: on the meta device, where its other parameters stay.
        missing: names of parameters.
    """
    for path, module in model.named_modules():
        for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            drawn = f"{path}.{name}".removeprefix(".") in missing
            real: Tensor = tensor
            if isinstance(tensor, nn.Parameter) and drawn:
                real = nn.Parameter(torch.empty_like(tensor, device="cpu"))
            elif not isinstance(tensor, nn.Parameter):
                real = torch.empty_like(tensor, device="cpu")
                drawn |= name in module._non_persistent_buffers_set
            real._is_hf_initialized = not drawn  # type: ignore[attr-defined]  # `initialize_weights` leaves it
            setattr(module, name, real)
    model.initialize_weights()


def check_stored(model: PreTrainedModel, weights: StoredWeights, path: str) -> None:
    """Compares the shapes of a checkpoint with those of a model.

    Raises:
        ValueError: a tensor has another shape.
    """
    for name, tensor in model.state_dict().items():
        if weights.shapes.get(name, list(tensor.shape)) != list(tensor.shape):
            raise ValueError(
                f"{path}: {name} has the shape {weights.shapes[name]}, but the model needs {list(tensor.shape)}; one "
                "of the two belongs to another model"
            )


def needed_names(model: PreTrainedModel, missing: set[str], headed: bool) -> list[str]:
    """The missing names that a checkpoint must have: those of the head only if it is `headed`; sorted."""
    prefix = "" if headed else inner_prefix(model)
    ignored = re.compile("|".join(f"({pattern})" for pattern in model._keys_to_ignore_on_load_missing or ["(?!)"]))
    return sorted(name for name in missing if name.startswith(prefix) and not ignored.search(name))


@torch.no_grad()
def fill(model: nn.Module, stored: Iterator[tuple[str, Any]]) -> None:
    """Writes stored tensors into the parameters of a model, which may be sharded, have adapters or be packed.

    Args:
        stored: names in a model without adapters, and tensors that are indexed by a slice of each dimension.
    """
    places = {
        f"{path}.{name}".removeprefix(".").replace(".base_layer.", "."): (module, tensor)
        for path, module in model.named_modules()
        for name, tensor in chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    }
    for name, source in stored:
        if name not in places:
            continue
        module, tensor = places[name]
        if isinstance(module, PackedLayer) and tensor is module.weight:
            source = module.pack(source[tuple(slice(0, size) for size in module.shape)])
        local, region = _local_part(tensor)
        if local.numel():
            local.copy_(source[region].to(local.device))  # between devices, `copy_` would convert the dtype on the CPU


def _local_part(tensor: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a tensor, and where it lies in the whole one."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _same(one: Any, other: Any) -> bool:
    """Two stored tensors are equal; read in parts."""
    shape = one.get_shape()
    if shape != other.get_shape():
        return False
    step = max(1, COMPARED // max(1, shape[-1]))
    return all(torch.equal(one[i : i + step], other[i : i + step]) for i in range(0, shape[0], step))
