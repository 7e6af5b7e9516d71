"""The processes of a run: a single one, or many under torchrun, with the same collectives."""

import atexit
import json
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

FAILURE = "rft/failure"  # key in the store of the process group: [rank, message] of the first error


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
        if "RANK" in os.environ and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _on_terminate)
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


class PeerError(ValueError):
    """This rank stops because another rank has failed; the message is that of the other rank."""


class FirstFailure:
    """Makes the first error of any rank in the block the error of all ranks.

    An error in the block is published to the other ranks. If the collective of a waiting rank then fails, or torchrun
    terminates that rank, a PeerError with the published message replaces its own error.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and dist.is_initialized() and "RANK" in os.environ:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the other ranks; this one ends by itself
            own = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            rank, text = _failure(json.dumps([dist.get_rank(), own]))
            if rank != dist.get_rank() and _from_collective(error):
                raise PeerError(f"rank {rank} failed first: {text}") from None


def _failure(own: str) -> tuple[int, str]:
    """The rank that failed first and its message; publishes this rank's own if there is none. `own` may be empty."""
    store = dist.distributed_c10d._get_default_store()
    rank, text = json.loads(store.compare_set(FAILURE, "", own) or '[-1, ""]')
    return rank, text


def _from_collective(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, may be that of a collective."""
    while error is not None:
        if isinstance(error, PeerError | RuntimeError):
            return True
        error = error.__cause__
    return False


def raise_peer_failure() -> None:
    """Raises a PeerError if another rank has failed; a handler of SIGTERM, which torchrun then sends, calls it."""
    rank, text = _failure("") if dist.is_initialized() and "RANK" in os.environ else (-1, "")
    if rank >= 0:
        raise PeerError(f"rank {rank} failed first: {text}")


def _on_terminate(number: int, _: Any) -> None:
    """At SIGTERM: raises a PeerError where another rank has failed; otherwise ends the process, as the default does."""
    signal.signal(number, signal.SIG_DFL)
    raise_peer_failure()
    os.kill(os.getpid(), number)


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
