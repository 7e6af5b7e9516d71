"""The processes of a run: a single one, or many under torchrun, with the same collectives."""

import atexit
import json
import os
import pickle
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rft.waits import waiting

JOIN_S = 600.0  # seconds in which all ranks of a run must have started
START_S = 0.05  # seconds after which rank 0 looks again which ranks have started
FAILURE = "rft/failure"  # key in the store of the process group: [rank, message] of the first error


class Wait:
    """The collective of a World in which this process waits, or the work in which the ranks need each other.

    Attributes:
        count: collectives that have begun so far, the same on all ranks that wait in one.
        name: of the collective; empty between collectives.
        work: what all ranks do together, with collectives that are none of a World; empty if there is nothing.
        thread: the thread that does this work; None: the main thread.
        since: when the collective or the work began, or a collective within the work ended, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.count, self.name, self.work, self.since = 0, "", "", 0.0
        self.thread: int | None = None

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """The block is the collective `name`."""
        self.count, self.since, self.name = self.count + 1, time.monotonic(), name
        try:
            yield
        finally:
            self.since, self.name = time.monotonic(), ""

    @contextmanager
    def during(self, work: str, thread: int | None = None) -> Iterator[None]:
        """The block is work that needs all ranks, such as the forward pass of a sharded model."""
        outer = self.work, self.thread
        self.since, self.work, self.thread = time.monotonic(), work, thread
        try:
            yield
        finally:
            self.since = time.monotonic()
            self.work, self.thread = outer


class World:
    """The process group as the rest of the code sees it.

    Attributes:
        rank, size: the rank of this process, and the number of processes.
        device: where this process computes.
        mesh: a one-dimensional device mesh over all processes.
        wait: the collective in which this process waits, or its work with all ranks.
    """

    def __init__(self, device: torch.device, mesh: DeviceMesh) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self.mesh = mesh
        self.wait = Wait()

    def all_sum(self, tensor: Tensor) -> Tensor:
        """Sum of a tensor over all ranks, on every rank."""
        total = tensor.detach().clone().to(self.device)
        with self.wait.within("all_sum"):
            dist.all_reduce(total)
        return total.to(tensor.device)

    def gather(self, thing: Any) -> list[Any]:
        """The argument of every rank, in rank order, on every rank."""
        if self.size == 1:
            return [thing]
        things: list[Any] = [None] * self.size
        with self.wait.within("gather"):
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
        with self.wait.within("exchange"):
            dist.all_to_all_single(received_sizes, sizes)
            outgoing = torch.frombuffer(bytearray(b"".join(pickled)), dtype=torch.uint8).to(self.device)
            incoming = outgoing.new_empty(int(received_sizes.sum()))
            dist.all_to_all_single(incoming, outgoing, received_sizes.tolist(), sizes.tolist())
        received = [data.numpy().tobytes() for data in incoming.cpu().split(received_sizes.tolist())]
        return [items[rank] if rank == self.rank else pickle.loads(data) for rank, data in enumerate(received)]

    def gather_bytes(self, data: Tensor, lengths: list[int]) -> list[Tensor]:
        """The bytes of every rank, in rank order, on rank 0; elsewhere nothing.

        Args:
            data: of this rank, (n,) uint8.
            lengths: n of every rank, the same on all.
        """
        if self.size == 1:
            return [data]
        here = self.rank == 0
        incoming = torch.empty(sum(lengths) if here else 0, dtype=torch.uint8, device=self.device)
        sizes = lengths if here else [0] * self.size
        with self.wait.within("gather_bytes"):
            dist.all_to_all_single(incoming, data.to(self.device), sizes, [len(data)] + [0] * (self.size - 1))
        return [*incoming.cpu().split(lengths)] if here else []

    def new_group(self, ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
        """A group of some ranks, or of all. A collective of all ranks."""
        with self.wait.within("new_group"):
            return dist.new_group(None if ranks is None else list(ranks), backend=backend)

    def new_mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """A mesh over all ranks, with a group for each of its dimensions. A collective."""
        with self.wait.within("new_mesh"):
            return init_device_mesh(self.device.type, shape, mesh_dim_names=names)

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Calls `choose` on rank zero and broadcasts the result; its ValueError or OSError is raised on every rank."""
        result: list[Any] = [None, None]  # value, error
        if self.rank == 0:
            try:
                result = [choose(), None]
            except (ValueError, OSError) as error:
                result = [None, error]
        if self.size > 1:
            with self.wait.within("decide"):
                dist.broadcast_object_list(result, src=0)
        if result[1] is not None:
            raise result[1]
        return result[0]


class SingleProcess(World):
    """A world of one process without a process group; it has no device and no mesh."""

    def __init__(self) -> None:
        self.rank, self.size, self.wait = 0, 1, Wait()


SINGLE_PROCESS = SingleProcess()


def device_kind(device: str) -> str:
    """The kind of device, `cuda` or `cpu`, that `auto`, `cpu` or `cuda` names on this machine."""
    return "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"


def missing_capability(least: tuple[int, int]) -> str | None:
    """What this machine's GPU lacks if its compute capability is below `least`; None without a GPU (`mode=plan`)."""
    if torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < least:
        return f"a GPU of compute capability {least[0]}.{least[1]} or more, and this one has {found[0]}.{found[1]}"
    return None


def start(device: str) -> World:
    """Joins the processes of torchrun, or starts a group of one. A second call keeps the process group.

    Args:
        device: `auto` (CUDA where there is one), `cpu` or `cuda`.

    Raises:
        ValueError: `device` is `cuda` and torch finds no CUDA device, no network interface is found, or not all ranks
            start within `JOIN_S`.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "strategy.device=cuda, but this torch sees no CUDA device; set strategy.device=cpu or install a CUDA build"
        )
    kind = device_kind(device)
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        if "RANK" in os.environ and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _on_terminate)
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        try:
            if "RANK" in os.environ:
                with _waiting_for_ranks("to start"):
                    _join(backend)
            else:
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        except dist.DistError as error:  # of the store, through which the ranks find each other
            raise ValueError(
                f"rank {os.environ['RANK']} did not find {_all_ranks()} within {JOIN_S:g} s "
                f"({str(error).splitlines()[0]}): start all of them within this time, see their output, or check the "
                "network between their machines"
            ) from error
        except RuntimeError as error:
            if "gloo/transport" not in str(error):
                raise
            raise no_interface("gloo", str(error)) from error
        atexit.register(stop)
    here = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    world = World(here, init_device_mesh(kind, (dist.get_world_size(),)))
    if kind == "cuda":
        check_nccl(world)
    return world


def _join(backend: str) -> None:
    """Joins the process group of torchrun, or of another program that sets its variables."""
    timeout = timedelta(seconds=JOIN_S)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        dist.init_process_group(backend, timeout=timeout)
    else:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            backend, timeout=timeout, store=fresh_part(store, rank, size), rank=rank, world_size=size
        )


def fresh_part(store: dist.Store, rank: int, size: int) -> dist.Store:
    """The part of a store that only this start of the ranks writes: torchrun (PyTorch 2.13) keeps the store when it
    starts them again, with all that they have written. A collective.

    Each rank asks rank 0 for the name of the part with a name of its own, so none reads an answer of an earlier start.

    Raises:
        dist.DistStoreError: not all ranks start within `JOIN_S`.
    """
    own = uuid4().hex
    if rank > 0:
        store.set(f"rft/asked/{rank}", own)
        part = store.get(f"rft/answer/{own}").decode()
        store.set(f"rft/joined/{part}/{rank}", "")
        return dist.PrefixStore(part, store)
    deadline, missing = time.monotonic() + JOIN_S, list(range(1, size))
    while missing := [other for other in missing if not store.check([f"rft/joined/{own}/{other}"])]:
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {', '.join(map(str, missing))} have not started")
        for other in missing:
            asked = store.compare_set(f"rft/asked/{other}", "", "").decode()  # empty before the rank has started
            store.set(f"rft/answer/{asked}", own)
        time.sleep(START_S)
    return dist.PrefixStore(own, store)


def _all_ranks() -> str:
    ranks, host, port = (os.environ[name] for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    return f"all {ranks} ranks of the run at {host}:{port}"


def _waiting_for_ranks(what: str) -> AbstractContextManager[None]:
    """The block waits for all ranks, which two ranks of every machine say: one of them may be the missing one."""
    wait = f"rank {os.environ['RANK']} waits for {_all_ranks()} {what}"
    return waiting(wait) if os.environ.get("LOCAL_RANK", "0") in ("0", "1") else nullcontext()


def check_nccl(world: World) -> None:
    """The first collective on GPUs, in which NCCL looks for a network. Raises a ValueError if it finds none."""
    try:
        world.all_sum(torch.zeros((), device=world.device))
    except RuntimeError as error:
        if "NCCL" not in str(error) or not re.search("socket interface|bootstrap", str(error), re.IGNORECASE):
            raise
        raise no_interface("nccl", str(error)) from error


def no_interface(library: str, message: str) -> ValueError:
    """The error of a process whose library for collectives finds no network interface, with its message."""
    variable = f"{library.upper()}_SOCKET_IFNAME"
    given = f"{variable}={os.environ[variable]}" if variable in os.environ else f"{variable} is not set"
    reason = next(line for line in reversed(message.strip().splitlines()) if line.strip()).strip()
    return ValueError(
        f"{library} finds no network interface ({reason}; {given}): set {variable} to one that `ip address` lists and "
        "that reaches the other machines of the run, or to lo for a run on one machine"
    )


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


def first_failure(store: dist.Store, own: str) -> tuple[int, str]:
    """The rank that failed first and its message; (-1, "") if none has.

    Args:
        store: of the process group.
        own: what this rank publishes if no rank has failed before, as the JSON of [rank, message]; may be empty.
    """
    rank, text = json.loads(store.compare_set(FAILURE, "", own) or '[-1, ""]')
    return rank, text


def _failure(own: str) -> tuple[int, str]:
    return first_failure(dist.distributed_c10d._get_default_store(), own)


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


def leave(status: int = 0) -> None:
    """Ends a process of torchrun after a barrier, with this exit status; does nothing without torchrun.

    It skips the interpreter's teardown, in which threads of gloo sometimes abort a process after its work is done.
    """
    if "RANK" in os.environ and dist.is_initialized():
        with suppress(RuntimeError), _waiting_for_ranks("to end"):  # an error of a rank that has died: the work is done
            dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
