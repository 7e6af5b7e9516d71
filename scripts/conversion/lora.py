"""Merges a LoRA adapter in peft's format into its base, one tensor at a time; see `rft.actor.lora.stored`."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from conversion.model_folder import read_tensors
from rft.actor.lora.stored import PREFIX, WEIGHTS, delta, read_options


def merged(adapter: Path, base: Path, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the base with the adapter.

    Args:
        adapter: a folder with adapter_config.json and adapter_model.safetensors.
        base: the folder of the model that it was trained on.
        dtype: of the sums, which are computed in float32; None: as in the base.

    Raises:
        ValueError: the adapter cannot be merged by the formula, or belongs to another base.
    """
    options = read_options(adapter)
    tensors = load_file(adapter / WEIGHTS)
    left = set(tensors)
    for name, weight in read_tensors(base):
        module, _, kind = name.rpartition(".")
        down, up, whole = (f"{PREFIX}{module}.{part}" for part in ("lora_A.weight", "lora_B.weight", kind))
        if whole in tensors:  # of modules_to_save
            weight = tensors[whole]
        if kind == "weight" and down in tensors:
            kept = weight.dtype if dtype is None else getattr(torch, dtype)
            weight = (weight.float() + delta(tensors[down], tensors[up], module, options)).to(kept)
            left -= {down, up}
        left.discard(whole)
        yield name, weight
    if left:
        raise ValueError(f"{adapter}: the base {base} has no place for {sorted(left)[0]}; name its own base")
