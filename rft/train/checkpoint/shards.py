"""Tensors of a checkpoint: torch.distributed.checkpoint, in safetensors files of which each rank writes its own."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException

FILE_BYTES = 2**28


class Stager:
    """Copies tensors to the CPU before they are written, pinned where they come from a GPU; keeps the copies for the
    next checkpoint.

    `DefaultStager` of torch would do the same, but that of torch 2.11 can be used only once.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._copies = StateDictStager(pin_memory=self._cuda, share_memory=False)

    def stage(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The copies, complete."""
        staged = self._copies.stage(dict(tensors), non_blocking=self._cuda)
        if self._cuda:
            torch.cuda.synchronize()
        return staged


def file_numbers(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """The number of the file, from 1 on, of each tensor. The same on every rank.

    A file is serialized in memory before it is written, so none gets much more than `FILE_BYTES` of a rank.
    """
    numbers, number, filled = dict[str, int](), 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.itemsize // ranks
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


def largest_file(tensors: Mapping[str, Tensor], ranks: int) -> int:
    """Bytes of a rank in the largest file of `file_numbers`."""
    sizes: dict[int, int] = {}
    for name, number in file_numbers(tensors, ranks).items():
        sizes[number] = sizes.get(number, 0) + tensors[name].nbytes // ranks
    return max(sizes.values(), default=0)


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    """Writes tensors on the CPU, each rank its shards. A collective of the group.

    Args:
        tensors: DTensors are written by the ranks that hold them, others by one rank. At least one.

    Raises:
        CheckpointException: a rank could not write, on every rank.
    """
    numbers = file_numbers(tensors, group.size())
    writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=numbers, save_distributed=True)
    dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def load_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fills tensors in place, each rank its shards, written by any number of ranks. A collective.

    Args:
        tensors: by the names with which they were written.
    """
    if tensors:
        reader = dcp.HuggingFaceStorageReader(str(folder))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in scripts
            dcp.load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())


def reason_of(error: BaseException) -> str:
    """The first line of an error; of torch.distributed.checkpoint that of the rank that failed."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {reason_of(cause)}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
