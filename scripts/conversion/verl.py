"""Reads the model of a verl checkpoint of FSDP: a state dict of DTensors for each rank.

The layout is that of verl's `verl/model_merger/fsdp_model_merger.py`: a mesh ("fsdp",), or ("ddp", "fsdp") of which the
first row has a whole model. Plain tensors are whole on every rank: buffers, and with FSDP1 the weights of a model that
is not sharded (`fsdp_size` 1).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard  # it makes the classes of DTensors known to torch.load

from conversion.model_folder import read_pickled

PATTERN = "model_world_size_{}_rank_{}.pt"
CONFIG = "huggingface"  # the folder beside the shards with config and tokenizer


def read_shards(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of a checkpoint, one after another; the files are mapped into memory.

    Raises:
        ValueError: the folder is no such checkpoint, or is sharded in another way.
    """
    found = sorted(folder.glob(PATTERN.format("*", 0)))
    if len(found) != 1:
        raise ValueError(f"{folder} has {len(found)} files {PATTERN.format('*', 0)}; name the folder `actor` of a step")
    ranks = int(found[0].name.split("_")[3])
    first = read_pickled(found[0], {})
    parts = _parts(first, ranks, folder)
    shards = [first, *(read_pickled(folder / PATTERN.format(ranks, rank), {}) for rank in range(1, parts))]
    for name in first:
        if "lora_" in name:
            raise ValueError(f"{folder}: {name} belongs to an adapter; convert the folder lora_adapter with `merge`")
        yield name, _whole([shard[name] for shard in shards], name, folder)


def _parts(state: dict[str, Any], ranks: int, folder: Path) -> int:
    """How many ranks have the parts of one whole model."""
    meshes = {tensor.device_mesh.mesh_dim_names: tensor for tensor in state.values() if isinstance(tensor, DTensor)}
    if len(meshes) > 1 or not meshes.keys() <= {("fsdp",), ("ddp", "fsdp")}:
        raise ValueError(f"{folder}: the meshes {sorted(map(str, meshes))}; only (fsdp,) and (ddp, fsdp) are read")
    return next((int(tensor.device_mesh.mesh.shape[-1]) for tensor in meshes.values()), ranks)


def _whole(parts: list[Any], name: str, folder: Path) -> Tensor:
    if not isinstance(parts[0], DTensor):
        first: Tensor = parts[0]
        if not all(torch.equal(first, part) for part in parts[1:]):
            raise ValueError(
                f"{folder}: {name} is whole on every rank, and not equal there; copy the files there again"
            )
        return first
    placement = parts[0].placements[-1]
    local = [part._local_tensor for part in parts]
    if isinstance(placement, Replicate):
        return local[0]
    if type(placement) is not Shard:
        raise ValueError(f"{folder}: {name} is placed as {placement}, which is not read")
    return torch.cat(local, placement.dim)
