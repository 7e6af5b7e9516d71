"""The processes of a run: a single one, or many under torchrun, with the same collectives."""

import atexit
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class World:
    """The process group as the rest of the code sees it.

    Attributes:
        rank, size: the rank of this process, and the number of processes.
        device: where this process computes.
        mesh: a one-dimensional device mesh over all processes.
    """

    def __init__(self, device: torch.device, mesh: DeviceMesh) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self.mesh = mesh

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum of a tensor over all ranks, on every rank."""
        total = tensor.detach().clone().to(self.device)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def gather(self, thing: Any) -> list[Any]:
        """The argument of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def exchange(self, items: list[Any]) -> list[Any]:
        """Sends item r to rank r (all-to-all), and returns the items that all ranks sent to this one, in rank order.

        The item for this rank itself is not copied. Other items are pickled: a tensor is sent with its whole storage.
        """
        if self.size == 1:
            return items
        pickled = [b"" if rank == self.rank else pickle.dumps(item) for rank, item in enumerate(items)]
        sizes = torch.tensor([len(data) for data in pickled], device=self.device)
        received_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(received_sizes, sizes)
        outgoing = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8).to(self.device)
        incoming = outgoing.new_empty(int(received_sizes.sum()))
        dist.all_to_all_single(incoming, outgoing, received_sizes.tolist(), sizes.tolist())
        received = [data.numpy().tobytes() for data in incoming.cpu().split(received_sizes.tolist())]
        return [items[rank] if rank == self.rank else pickle.loads(data) for rank, data in enumerate(received)]

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Calls `choose` on rank zero and broadcasts the result; its ValueError or OSError is raised on every rank."""
        result: list[Any] = [None, None]  # value, error
        if self.rank == 0:
            try:
                result = [choose(), None]
            except (ValueError, OSError) as error:
                result = [None, error]
        if self.size > 1:
            dist.broadcast_object_list(result, src=0)
        if result[1] is not None:
            raise result[1]
        return result[0]


class SingleProcess(World):
    """A world of one process without a process group; it has no device and no mesh."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


SINGLE_PROCESS = SingleProcess()


def start(device: str) -> World:
    """Joins the processes of torchrun, or starts a group of one. A second call keeps the process group.

    Args:
        device: `auto` (CUDA where there is one), `cpu` or `cuda`.

    Raises:
        ValueError: `device` is `cuda` and torch finds no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "strategy.device=cuda, but this torch sees no CUDA device; set strategy.device=cpu or install a CUDA build"
        )
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timedelta(minutes=30))
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(stop)
    here = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    return World(here, init_device_mesh(kind, (dist.get_world_size(),)))


@contextmanager
def pretend(ranks: int) -> Iterator[World]:
    """Simulates a process group of `ranks` in this process, with torch's fake backend.

    Every other rank is assumed to send what this one sends.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    assert not dist.is_initialized(), "a real process group exists"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield World(torch.device("cpu"), init_device_mesh("cpu", (ranks,)))
    finally:
        dist.destroy_process_group()


def stop() -> None:
    """Destroys the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave() -> None:
    """Ends a process of torchrun after a barrier; does nothing without torchrun.

    It skips the interpreter's teardown, in which threads of gloo sometimes abort a process after its work is done.
    """
    if "RANK" in os.environ and dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
