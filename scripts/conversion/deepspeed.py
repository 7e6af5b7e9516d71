"""Reads the float32 weights of a DeepSpeed checkpoint of ZeRO stage 1, 2 or 3.

The layout is that of DeepSpeed's `deepspeed/utils/zero_to_fp32.py`. Each rank has a file `*_optim_states.pt` with its
part of every parameter group, flat. In stages 1 and 2 the parts of a group follow each other, and the parameters in
them, with gaps where `parameter_alignment` aligns them (DeepSpeed 0.19). In stage 3 each parameter is cut into equal
parts, the last one padded, and a rank has its part of each.
"""

import math
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from conversion.model_folder import read_pickled

NAME = re.compile(r"(bf16_)?(zero_pp_rank_\d+_)?mp_rank_00_(model|optim)_states\.pt")
FLAT_1_2, FLAT_3 = "single_partition_of_fp32_groups", "fp32_flat_groups"
GAPS = "param_alignment_paddings"  # of each group the elements after each of its parameters; older files have none


class Inert:
    """Stands for an object of DeepSpeed, which is not imported and not needed."""

    def __new__(cls, *_: Any) -> "Inert":
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None: ...


def read_zero(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of a checkpoint, one after another; the files are mapped into memory.

    Args:
        folder: that of the run, whose file `latest` names a step, or that of a step.

    Raises:
        ValueError: files are missing, or the checkpoint is of another kind.
    """
    if (folder / "latest").is_file():
        folder = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    models = [_read(file) for file in _ranked(folder, "*_model_states.pt")]
    optimizers = [_read(file)["optimizer_state_dict"] for file in _ranked(folder, "*_optim_states.pt")]
    count = optimizers[0]["partition_count"]
    if len(optimizers) != (wanted := max(count) if isinstance(count, list) else count):
        raise ValueError(f"{folder} has {len(optimizers)} files *_optim_states.pt of {wanted}; copy all of them there")
    first = models[0]
    buffers = {name: first["module"][name] for name in first["buffer_names"]}
    found = {name: buffer.float() if buffer.is_floating_point() else buffer for name, buffer in buffers.items()}
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        parts = torch.cat([model["frozen_param_fragments"][name].reshape(-1) for model in models])
        found[name] = parts[: shape.numel()].view(shape)
    read = _stage_3 if FLAT_3 in optimizers[0] else _stage_1_2
    if read is _stage_1_2:  # stage 1 has frozen weights here alone
        known = {name for group in first["param_shapes"] for name in group} | first["shared_params"].keys()
        found = {name: tensor for name, tensor in first["module"].items() if name not in known} | found
    for name, tensor in chain(found.items(), read(first["param_shapes"], optimizers, folder)):
        yield name, tensor
        yield from ((alias, tensor) for alias, shared in first["shared_params"].items() if shared == name)


def _stage_1_2(shapes: list[Any], optimizers: list[Any], folder: Path) -> Iterator[tuple[str, Tensor]]:
    gaps = optimizers[0].get(GAPS) or [[0] * len(group) for group in shapes]
    for number, group in enumerate(shapes):
        flat = torch.cat([optimizer[FLAT_1_2][number] for optimizer in optimizers])
        offset = 0
        for (name, shape), gap in zip(group.items(), gaps[number], strict=True):
            yield name, flat[offset : offset + shape.numel()].view(shape)
            offset += shape.numel() + gap
        _check_length(offset, len(flat), 2 * len(optimizers), folder)


def _stage_3(shapes: list[Any], optimizers: list[Any], folder: Path) -> Iterator[tuple[str, Tensor]]:
    flat = [torch.cat(list(optimizer[FLAT_3])) for optimizer in optimizers]
    offset = 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        length = math.ceil(shape.numel() / len(flat))
        parts = torch.cat([rank[offset : offset + length] for rank in flat])
        yield name, parts[: shape.numel()].view(shape)
        offset += length
    _check_length(offset, len(flat[0]), 1, folder)


def _check_length(used: int, there: int, aligned: int, folder: Path) -> None:
    """Raises a ValueError where parameters do not fill the parts, up to padding to a multiple of `aligned`."""
    if math.ceil(used / aligned) != math.ceil(there / aligned):
        raise ValueError(f"{folder}: its parameters have {used} elements, its files {there}; copy them there again")


def _ranked(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern by the numbers in their names."""
    files = sorted(folder.glob(pattern), key=lambda file: [int(number) for number in re.findall(r"\d+", file.name)])
    if not files:
        raise ValueError(f"{folder} has no file {pattern}; name the folder of a DeepSpeed checkpoint")
    if odd := [file.name for file in files if not NAME.fullmatch(file.name)]:
        raise ValueError(f"{folder}: {odd[0]} is of tensor parallelism or of experts, which are not read")
    return files


def _read(file: Path) -> Any:
    names = get_unsafe_globals_in_checkpoint(file)
    return read_pickled(file, {name: Inert for name in names if name.startswith("deepspeed.")})
