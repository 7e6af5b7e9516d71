"""Tensors of a checkpoint: torch.distributed.checkpoint, in safetensors files of which each rank writes its own."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


def make_stager(device: torch.device) -> DefaultStager:
    """What copies tensors to the CPU before they are written, pinned where they come from a GPU."""
    cuda = device.type == "cuda"
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
        )
    )


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    """Writes tensors on the CPU, each rank its shards. A collective of the group.

    Args:
        tensors: DTensors are written by the ranks that hold them, others by one rank. At least one.

    Raises:
        CheckpointException: a rank could not write, on every rank.
    """
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def load_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fills tensors in place, each rank its shards, written by any number of ranks. A collective.

    Args:
        tensors: by the names with which they were written.
    """
    if tensors:
        reader = dcp.HuggingFaceStorageReader(str(folder))
        dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
