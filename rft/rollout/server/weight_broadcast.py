"""Weights to servers over process groups: rank zero and the workers of one server are one group, which no other server
can hold up. Tensors travel from the staged copy in buckets, and only those that the server does not hold already.

Memory of rank zero: less than two buckets a server, three where changed elements alone travel. A bucket is of `BUCKET`
bytes, or as large as the largest tensor.
"""

import asyncio
import socket
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from rft.remote.http_client import RequestFailed, ServerClient
from rft.rollout.server.options import Servers
from rft.rollout.server.remote.rft_receiver import WHOLE, About, broadcast, join, pack, sealed
from rft.rollout.server.weight_store import TYPES, Stored, WeightVersion

BUCKET = 2**28
DTYPES = {name: dtype for dtype, name in TYPES.items()}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Rendezvous:
    """Where a group meets, and who comes: rank zero, and `size` - 1 workers."""

    address: str
    port: int
    name: str
    size: int
    backend: str


Make = Callable[[list[str]], "Channel"]  # from the kind of device of every worker
Join = Callable[[ServerClient, Make], Coroutine[Any, Any, "Channel"]]


class Channel:
    """The group of rank zero and the workers of one server.

    Args:
        peer: the server.
        devices: the kind of device of every worker.
        device: of rank zero. The group is one of NCCL where all have GPUs, else one of gloo.
        timeout_s: deadline of the meeting, and of every bucket.
        deltas: the workers keep copies of what comes, so that changed elements alone can come later.

    Attributes:
        device: where tensors are when they go out.
        timeout_s: see above.
        sent: bytes that have gone out.
        meeting: where the workers are to come.
        copies: the digests of the tensors that the workers have copies of, by name; None where they keep none.
    """

    def __init__(
        self, peer: ServerClient, devices: list[str], device: torch.device, timeout_s: float, deltas: bool
    ) -> None:
        backend = "nccl" if {device.type, *devices} == {"cuda"} else "gloo"
        limit = timedelta(seconds=timeout_s)
        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._peer = peer
        self.device = device if backend == "nccl" else torch.device("cpu")
        self._group: Any = None
        self.timeout_s = timeout_s
        self.sent = 0
        self.copies: dict[str, str] | None = {} if deltas else None
        self.meeting = Rendezvous(_near(peer), self._store.port, f"rft-{uuid.uuid4().hex}", len(devices) + 1, backend)

    async def join(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Makes the group while a call has the workers come; what it answers.

        Raises:
            Failed: there is no group; or what the call raises.
        """

        def meet() -> None:
            about = self.meeting
            self._group = join(self._store, about.name, 0, about.size, about.backend, self.timeout_s)

        return await self._while(call, meet)

    async def send(self, tensors: Iterable[Tensor], call: Coroutine[Any, Any, Any]) -> Any:
        """Hands tensors to the workers, one after another, while a call has them receive; what it answers.

        Raises:
            Failed: they did not all go; or what the call raises.
        """
        group = self._group

        def hand_out() -> None:
            for tensor in tensors:
                if self._group is None:
                    break
                broadcast(group, tensor.to(self.device), self.timeout_s)
                self.sent += tensor.nbytes

        return await self._while(call, hand_out)

    async def _while(self, call: Coroutine[Any, Any, Any], work: Callable[[], None]) -> Any:
        """Has a thread do blocking work while the server answers a call. The thread ends by its deadline alone, so it
        is one that the end of this process does not wait for."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(None)

        def run() -> None:
            try:
                work()
                error = None
            except (RuntimeError, OSError, ValueError) as found:
                error = RequestFailed(f"{self._peer.name}: the process group with it: {found}")
            loop.call_soon_threadsafe(settle, error)

        threading.Thread(target=run, daemon=True, name=self.meeting.name).start()
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait((answer, done), return_when=asyncio.FIRST_EXCEPTION)
            failures = [error for ended in (answer, done) if ended.done() and (error := ended.exception()) is not None]
            if failures:
                raise failures[0]
            return answer.result()
        finally:
            answer.cancel()
            done.cancel()

    def copied(self, buckets: list["Bucket"]) -> None:
        """Notes that the workers have copies of these, if they keep any."""
        if self.copies is not None:
            self.copies |= {name: bucket.weights.tensors[name].digest for bucket in buckets for name in bucket.names}

    def close(self) -> None:
        """Leaves the group, which the workers learn from their connections."""
        if self.meeting.backend == "nccl" and self._group is not None:
            self._group.abort()
        self._group = None


class Connection:
    """The channel to one server, while both ends of it are well.

    Args:
        peer: the server.
        join: makes a channel to it; see `Dialect.join`.
        device: of the channels.
        options: of the servers.
    """

    def __init__(self, peer: ServerClient, join: Join, device: torch.device, options: Servers) -> None:
        self._join = partial(join, peer, lambda devices: Channel(peer, devices, device, options.sync_s, options.deltas))
        self._channel: Channel | None = None
        self._sent = 0

    async def channel(self, fresh: bool) -> Channel:
        """The channel there is, or a new one. Raises OSError where there is none to be had.

        Args:
            fresh: the server is not as it was left.
        """
        if fresh:
            self.part()
        if self._channel is None:
            self._channel = await self._join()
        return self._channel

    def sent(self) -> int:
        """Bytes that have gone to the server."""
        return self._sent + (self._channel.sent if self._channel is not None else 0)

    def part(self) -> None:
        """Gives the channel up."""
        if self._channel is not None:
            self._sent = self.sent()
            self._channel.close()
            self._channel = None


@dataclass(frozen=True)
class Bucket:
    """Some tensors of a version."""

    weights: WeightVersion
    names: list[str]

    def about(self) -> About:
        """Names, types and shapes."""
        entries = [(name, self.weights.tensors[name].entry) for name in self.names]
        return [(name, str(DTYPES[entry["dtype"]]).removeprefix("torch."), entry["shape"]) for name, entry in entries]

    def tensors(self) -> Iterator[Tensor]:
        """One after another, as they are read."""
        return (read(self.weights, name) for name in self.names)

    def messages(
        self, before: WeightVersion | None, copies: dict[str, str] | None, device: torch.device
    ) -> Iterator[Tensor]:
        """What `Receiver` takes, on a device: where there are copies the numbers of changed elements, and the tensors.

        Args:
            before: what the workers hold, None where that is not known.
            copies: digests of what they have copies of, or None; see `Channel`.
        """
        about = self.about()
        if copies is None:
            yield pack(about, [WHOLE] * len(about), ((tensor,) for tensor in self.tensors()), device)
            return
        parts = [self._part(name, before, copies) for name in self.names]
        changed = [len(part[0]) if len(part) > 1 else WHOLE for part in parts]
        yield sealed(torch.tensor([*changed, 0]).view(torch.uint8).to(device))
        yield pack(about, changed, parts, device)

    def _part(self, name: str, before: WeightVersion | None, copies: dict[str, str]) -> tuple[Tensor, ...]:
        new, entry = read(self.weights, name), self.weights.tensors[name].entry
        if before is None or name not in before.tensors or not before.folder.exists():
            return (new,)
        if not before.tensors[name].holds(entry["dtype"], entry["shape"], copies.get(name)):
            return (new,)
        return sparse_delta(new, read(before, name))


def read(weights: WeightVersion, name: str) -> Tensor:
    """A tensor of a version."""
    entry = weights.tensors[name].entry
    return torch.frombuffer(bytearray(weights.read(name)), dtype=DTYPES[entry["dtype"]]).view(entry["shape"])


def sparse_delta(new: Tensor, old: Tensor) -> tuple[Tensor, ...]:
    """Places (n,) int32 and new values (n,) of the elements that differ in any bit; or the whole, if that is less."""
    mine, theirs = (tensor.view(-1).view(BITS[new.itemsize]) for tensor in (new, old))
    places = (mine != theirs).nonzero()[:, 0]
    if new.numel() >= 2**31 or len(places) * (4 + new.itemsize) >= new.nbytes:
        return (new,)
    return places.int(), new.view(-1)[places]


def missing_tensors(weights: WeightVersion, before: WeightVersion | None) -> list[Bucket]:
    """What a server lacks.

    A layer travels whole where any of it differs: engines keep some of a layer's tensors as one (queries, keys and
    values, say), and load the parts of it together.

    Args:
        before: what the server holds, None where that is not known.
    """
    held = before.tensors if before is not None else {}
    layers: dict[str, list[str]] = {}
    for name in weights.tensors:
        layers.setdefault(_layer(name), []).append(name)
    buckets: list[Bucket] = []
    room = 0
    for names in layers.values():
        if all(_same(weights, held, name) for name in names):
            continue
        for name in names:
            start, end = weights.tensors[name].entry["data_offsets"]
            if not buckets or end - start > room:
                buckets.append(Bucket(weights, []))
                room = BUCKET
            buckets[-1].names.append(name)
            room -= end - start
    return buckets


def _same(weights: WeightVersion, held: dict[str, Stored], name: str) -> bool:
    stored = weights.tensors[name]
    return name in held and held[name].holds(stored.entry["dtype"], stored.entry["shape"], stored.digest)


def _near(peer: ServerClient) -> str:
    """This machine's address as the server sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # to connect it sends nothing
        probe.connect((peer.host, peer.port))
        return str(probe.getsockname()[0])


def _layer(name: str) -> str:
    """Of `model.layers.3.mlp.up_proj.weight`: `model.layers.3`; of a tensor outside of all stacks its module."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1] or parts)
