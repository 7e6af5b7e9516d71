"""The dtype of the files that the weights of a model were read from, in which an export writes them again."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from rft.actor.init import LOAD_WEIGHTS
from rft.actor.loading.stored import DTYPES, find_files, open_tensors
from rft.actor.lora.adapters import Lora
from rft.actor.lora.stored import StoredAdapter, model_path


def loaded_dtype(
    path: str | None, config: PretrainedConfig, lora: Lora | None, continued: StoredAdapter | None
) -> torch.dtype:
    """The dtype of what an export holds, where it is stored; float32 for what is new.

    Args:
        path: of the model, or of an adapter that is merged into it.
        config: of the model; names the dtype of files that only transformers can read.
        lora: null, or the adapters that train.
        continued: the adapter that trains on; None for a new one.
    """
    if lora is not None and lora.export == "adapter":
        return torch.float32 if continued is None else continued.dtype
    if path is None:
        return torch.float32
    files = find_files(model_path(path), config) if LOAD_WEIGHTS.get() else []
    dtype = most_common_dtype(files) or config.dtype
    return dtype if dtype in DTYPES.values() else torch.float32


def most_common_dtype(files: Sequence[str]) -> torch.dtype | None:
    """The dtype of most numbers in these files, of those of `DTYPES`; None where no number has one of them."""
    numbers = Counter[torch.dtype]()
    with open_tensors(files) as tensors:
        for tensor in tensors.values():
            if (name := tensor.get_dtype()) in DTYPES:
                numbers[DTYPES[name]] += math.prod(tensor.get_shape())
    return max(numbers, key=numbers.__getitem__, default=None)
