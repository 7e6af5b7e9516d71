"""Reads an adapter in peft's format, as a checkpoint with `lora.export=adapter` holds it or the hub has it.

Merged into its base it has the numbers of `PeftModel.from_pretrained(base, adapter).merge_and_unload()`: W + (B A)
alpha / r, or alpha / sqrt(r) with rank-stabilised LoRA; adapters in half precision are multiplied in float32.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, cached_file

from rft.actor.loading.stored import LazyTensor
from rft.actor.loading.tensor_names import outer_prefix
from rft.actor.lora.base import CONFIG

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Options of peft that change how weights merge, with the values for which the formula above holds.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none",),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "use_qalora": (False, None),
}


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter and the model that it belongs to.

    Attributes:
        path: the folder or hub name of the adapter.
        base: the folder or hub name of the model.
        options: of adapter_config.json.
        file: of the tensors.
    """

    path: str
    base: str
    options: Mapping[str, Any]
    file: str

    @cached_property
    def layers(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A (r, in) and B (out, r) by the names of their layers.

        Raises:
            ValueError: the adapter has other tensors.
        """
        left = load_file(self.file)
        names = [name.removesuffix(".lora_A.weight") for name in left if name.endswith(".lora_A.weight")]
        matrices = {
            name.removeprefix(PREFIX): (left.pop(f"{name}.lora_A.weight"), left.pop(f"{name}.lora_B.weight"))
            for name in names
        }
        if left:
            raise ValueError(
                f"{self.path}: {sorted(left)[0]} is no adapter of a linear layer; merge it with scripts/convert.py "
                "merge, or with peft"
            )
        return matrices

    @property
    def dtype(self) -> torch.dtype:
        """Of A and B."""
        return next(iter(self.layers.values()))[0].dtype

    def delta(self, layer: str) -> Tensor:
        """What the adapter adds to the weight of a layer, (out, in); see `delta`."""
        return delta(*self.layers[layer], layer, self.options)

    def merged(self, model: PreTrainedModel, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Tensors of the base, with the adapter. They are read where they are indexed by a slice of each dimension.

        Args:
            model: decides the names: a whole model, or its backbone.
        """
        outside = outer_prefix(model)
        for name, tensor in tensors:
            layer = f"{outside}{name}".removesuffix(".weight")
            adapted = name.endswith(".weight") and layer in self.layers
            yield name, self._sum(tensor, layer) if adapted else tensor

    def _sum(self, weight: Any, layer: str) -> LazyTensor:
        """A stored weight with what the adapter adds to it, in float32."""
        return LazyTensor(lambda region: self.delta(layer)[region].add_(weight[region]))

    def check(self, model: PreTrainedModel) -> None:
        """Compares the adapter with its model, which may be on the meta device.

        Raises:
            ValueError: it belongs to another model, or to a weight that is tied.
        """
        tensors = model.state_dict(keep_vars=True)
        tied = Counter(map(id, tensors.values()))
        for layer, (down, up) in self.layers.items():
            weight = tensors.get(f"{layer}.weight")
            shape = [down.shape[1], len(up)] if self.options.get("fan_in_fan_out") else [len(up), down.shape[1]]
            if weight is None or list(weight.shape) != shape:
                raise ValueError(
                    f"{self.path}: the model {self.base} has no layer {layer} of the shape {shape}; correct "
                    f"base_model_name_or_path in {CONFIG}"
                )
            if tied[id(weight)] > 1:
                raise ValueError(f"{self.path}: the weight of {layer} is tied to another one; merge it with peft")


def read_adapter(path: str, config: str) -> StoredAdapter:
    """The adapter of a folder or hub name. No tensor is read.

    Args:
        config: its file `CONFIG`.

    Raises:
        ValueError: the adapter has no weights, cannot be merged by the formula, names no model, or has one beside it.
    """
    find = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    if find(CONFIG_NAME) is not None:
        raise ValueError(f"{path} has a model ({CONFIG_NAME}) and an adapter ({CONFIG}); move one of them elsewhere")
    if (file := find(WEIGHTS)) is None:
        raise ValueError(f"{path}: the adapter has no {WEIGHTS}; copy it there")
    options = read_options(Path(config).parent)
    if not options.get("base_model_name_or_path"):
        raise ValueError(f"{path}: base_model_name_or_path in {CONFIG} is empty; write the path of its model there")
    return StoredAdapter(path, options["base_model_name_or_path"], options, file)


def read_options(folder: Path) -> Mapping[str, Any]:
    """The config of an adapter. Raises a ValueError where it cannot be merged by the formula."""
    options: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    for name, values in PLAIN.items():
        if name in options and options[name] not in values:
            raise ValueError(f"{folder}: {name}={options[name]}: merge this adapter with peft")
    return options


def delta(down: Tensor, up: Tensor, layer: str, options: Mapping[str, Any]) -> Tensor:
    """What an adapter adds to a weight, (out, in), in float32.

    Args:
        down, up: A (r, in) and B (out, r).
        layer: its name.
        options: of the adapter.
    """
    patterns = options.get("alpha_pattern") or {}
    alpha = next(
        (value for name, value in patterns.items() if re.fullmatch(rf"(.*\.)?({name})", layer)), options["lora_alpha"]
    )
    rank = len(down)
    product = up.float() @ down.float()  # (out, in)
    product = product.T if options.get("fan_in_fan_out") else product
    return product * (alpha / (math.sqrt(rank) if options.get("use_rslora") else rank))
