"""The part of a sharded tensor that is on this rank, and the whole for an engine: on every rank, or on rank 0 alone."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class GatherOptions:
    """How an engine takes the weights of a model.

    Attributes:
        dtype: sharded floating-point tensors are rounded to it before they are gathered, if it has fewer bytes; None:
            they are gathered as they are.
        rank_zero_only: the other ranks send their shards and get nothing.
        sharded: every rank takes its own rows (`own_rows`): tensors whose rows are sharded are neither rounded nor
            gathered, all others are whole on every rank.
    """

    dtype: torch.dtype | None = None
    rank_zero_only: bool = False
    sharded: bool = False


WHOLE = GatherOptions()  # as they are, on every rank
RANK_ZERO = GatherOptions(rank_zero_only=True)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, which shares its storage; a tensor that is not sharded is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_count(tensor: Tensor) -> int:
    """The number of ranks over which a tensor is sharded; replicas are not counted."""
    if not isinstance(tensor, DTensor):
        return 1
    placements = enumerate(tensor.placements)
    return math.prod(tensor.device_mesh.size(dim) for dim, placed in placements if not placed.is_replicate())


def has_sharded_rows(tensor: Tensor) -> bool:
    """Whether each rank, or each of a group of replicas, holds a block of the rows of a tensor."""
    if not isinstance(tensor, DTensor):
        return False
    *outer, last = tensor.placements
    return type(last) is Shard and last.dim == 0 and all(placement.is_replicate() for placement in outer)


def own_rows(tensor: Tensor, rank: int) -> tuple[Tensor, int]:
    """The rows of a tensor that a rank contributes, and the number of the first: every row is of one rank.

    Args:
        tensor: one that `has_sharded_rows`, or a whole one, which rank 0 contributes.
        rank: of this process.
    """
    if not isinstance(tensor, DTensor):
        return (tensor if rank == 0 else tensor.reshape(-1)[:0]), 0
    mesh, local = tensor.device_mesh, tensor.to_local()
    if dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))[0] != 0:  # a replica
        return local[:0], 0
    return local, min(mesh.get_local_rank(mesh.ndim - 1) * -(-len(tensor) // mesh.size(mesh.ndim - 1)), len(tensor))


def gather(tensor: DTensor, options: GatherOptions) -> Tensor | None:
    """The whole tensor, or None on a rank that gets none. A collective.

    Tensors that are split in several dimensions (tensor parallelism) are gathered on every rank. On one rank the tensor
    shares the storage of the given one, unless it is rounded.
    """
    dtype = options.dtype
    if dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > dtype.itemsize:
        rounded = tensor.to(dtype)
        assert isinstance(rounded, DTensor)
        tensor = rounded
    if tensor.device_mesh.size() == 1:
        return tensor.to_local()
    if not options.rank_zero_only:
        return tensor.full_tensor()
    if has_sharded_rows(tensor):
        return _gather_rows(tensor)
    whole = tensor.full_tensor()
    return whole if dist.get_rank() == 0 else None


def _gather_rows(tensor: DTensor) -> Tensor | None:
    """The whole of a tensor whose rows are sharded, on rank 0; the ranks of other replicas send nothing."""
    mesh = tensor.device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    ranks = dist.get_process_group_ranks(group)
    if ranks[0] != 0:
        return None
    local = tensor.to_local()  # the last ranks have fewer rows, or none
    rows = -(-len(tensor) // len(ranks))
    if len(local) < rows:
        padded = local.new_zeros(rows, *local.shape[1:])
        padded[: len(local)] = local
        local = padded
    first = dist.get_rank() == 0
    whole = local.new_empty(rows * len(ranks), *local.shape[1:]) if first else None
    parts = None if whole is None else list(whole.split(rows))
    dist.gather(local.contiguous(), parts, group=group, group_dst=0)
    return None if whole is None else whole[: len(tensor)]
