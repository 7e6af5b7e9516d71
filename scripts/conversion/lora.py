"""Merges a LoRA adapter in peft's format into its base, one tensor at a time.

The numbers are those of `PeftModel.from_pretrained(base, adapter).merge_and_unload()`: W + (B A) alpha / r, or alpha /
sqrt(r) with rank-stabilised LoRA; adapters in half precision are multiplied in float32.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from conversion.model_folder import read_tensors

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


def merged(adapter: Path, base: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the base with the adapter.

    Args:
        adapter: a folder with adapter_config.json and adapter_model.safetensors.
        base: the folder of the model that it was trained on.

    Raises:
        ValueError: the adapter cannot be merged by the formula, or belongs to another base.
    """
    options = read_options(adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    left = set(tensors)
    for name, weight in read_tensors(base):
        module, _, kind = name.rpartition(".")
        down, up, whole = (f"{PREFIX}{module}.{part}" for part in ("lora_A.weight", "lora_B.weight", kind))
        if whole in tensors:  # of modules_to_save
            weight = tensors[whole]
        if kind == "weight" and down in tensors:
            weight = weight.clone()
            weight += delta(tensors[down], tensors[up], module, options)
            left -= {down, up}
        left.discard(whole)
        yield name, weight
    if left:
        raise ValueError(f"{adapter}: the base {base} has no place for {sorted(left)[0]}; name its own base")


def read_options(adapter: Path) -> Mapping[str, Any]:
    """The config of an adapter. Raises a ValueError where it cannot be merged by the formula."""
    options: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    for name, values in PLAIN.items():
        if name in options and options[name] not in values:
            raise ValueError(f"{adapter}: {name}={options[name]}: merge this adapter with peft")
    return options


def delta(down: Tensor, up: Tensor, module: str, options: Mapping[str, Any]) -> Tensor:
    """What an adapter adds to a weight, (out, in).

    Args:
        down, up: A (r, in) and B (out, r).
        module: the name of its module.
        options: of the adapter.
    """
    patterns = options.get("alpha_pattern") or {}
    alpha = next(
        (value for name, value in patterns.items() if re.fullmatch(rf"(.*\.)?({name})", module)), options["lora_alpha"]
    )
    rank = len(down)
    product = up.float() @ down.float()  # (out, in)
    product = product.T if options.get("fan_in_fan_out") else product
    return product * (alpha / (math.sqrt(rank) if options.get("use_rslora") else rank))
