"""The processes of a run: one alone or many under torchrun, with the same collectives either way."""

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
        rank, size: this process and how many there are.
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
        """What every rank handed in, in rank order, on every rank."""
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def exchange(self, parcels: list[Any]) -> list[Any]:
        """Hands parcel r to rank r and returns what every rank had for this one, in rank order.

        What a rank has for itself is not copied; a tensor in any other parcel travels with its whole storage.
        """
        if self.size == 1:
            return parcels
        sealed = [b"" if rank == self.rank else pickle.dumps(parcel) for rank, parcel in enumerate(parcels)]
        sizes = torch.tensor([len(parcel) for parcel in sealed], device=self.device)
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes)
        outgoing = torch.frombuffer(bytearray(b"".join(sealed)), dtype=torch.uint8).to(self.device)
        incoming = outgoing.new_empty(int(arriving.sum()))
        dist.all_to_all_single(incoming, outgoing, arriving.tolist(), sizes.tolist())
        received = [part.numpy().tobytes() for part in incoming.cpu().split(arriving.tolist())]
        return [parcels[rank] if rank == self.rank else pickle.loads(part) for rank, part in enumerate(received)]

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Lets rank zero decide and tells the others; an error of rank zero is raised on every rank."""
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer = [choose(), None]
            except (ValueError, OSError) as error:
                answer = [None, error]
        if self.size > 1:
            dist.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]


class SingleProcess(World):
    """One process without a process group, which asks only for its rank and for the number of processes."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1


SINGLE_PROCESS = SingleProcess()


def start(device: str) -> World:
    """Joins the processes of torchrun, or starts a group of one. A second call keeps the process group.

    Args:
        device: `auto` (CUDA where there is one), `cpu` or `cuda`.

    Raises:
        ValueError: `cuda` is asked for and torch sees none.
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
    """This process as one of many that are not there: what the others would send is what this one sends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    assert not dist.is_initialized(), "the process group is a real one"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield World(torch.device("cpu"), init_device_mesh("cpu", (ranks,)))
    finally:
        dist.destroy_process_group()


def stop() -> None:
    """Leaves the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave() -> None:
    """Ends a process of torchrun once all of them have come this far; does nothing in a process of its own.

    It skips the interpreter's teardown, where threads of gloo abort a process now and then that has done all its work.
    """
    if "RANK" in os.environ and dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
