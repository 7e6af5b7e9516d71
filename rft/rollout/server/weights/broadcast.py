"""Weights to servers over process groups. Each group holds rank 0 and the workers of one server, so that no server can
block another. Tensors come from the files of the weight store, in buckets; a server gets only tensors that it lacks.
On one machine they may go through memory that rank 0 and the workers share; the group then only says when.

Memory of rank 0: less than two buckets a server, three where only changed elements are sent. A bucket has `BUCKET`
bytes, or those of its only tensor.
"""

import asyncio
import secrets
import socket
import threading
import uuid
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import TCPStore

from rft.remote.http_client import RequestFailed, ServerClient
from rft.rollout.server.remote.rft_receiver import authenticate, broadcast, join, own_address
from rft.rollout.server.weights.buckets import Bucket, missing_tensors
from rft.rollout.server.weights.transport import WeightTransport
from rft.rollout.server.weights.version import WeightVersion


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a process group find each other: rank 0, which listens at the address, and `size` - 1
    workers. The server passes the token to its workers."""

    address: str
    port: int
    name: str
    size: int
    backend: str
    token: str


class GroupTransport(WeightTransport):
    """Sends weights over the process group of rank 0 and the workers of one server. A subclass lets the workers join
    and load what they receive.

    Args:
        client: of the server.
        devices: the device type of every worker.
        device: of rank 0.
        timeout_s: deadline of the rendezvous, and of every message.

    Attributes:
        shares_memory: messages go through memory of this machine. Otherwise the group itself sends them, with NCCL if
            all members have GPUs and with gloo if not.
        device: where rank 0 holds a message while it is sent; shared memory is there too.
        timeout_s: as given.
        rendezvous: for the workers.
        memory: through which the messages go now, one after another, (bytes,) uint8; None: the group itself sends.
    """

    shares_memory: ClassVar[bool] = False

    def __init__(self, client: ServerClient, devices: list[str], device: torch.device, timeout_s: float) -> None:
        super().__init__(client)
        on_gpus = all_on_gpus(device, devices)
        backend = "nccl" if on_gpus and not self.shares_memory else "gloo"  # NCCL refuses two members on one GPU
        limit = timedelta(seconds=timeout_s)
        address = own_address(client.host, client.port)
        listening = socket.create_server((address, 0))  # TCPStore itself listens on all interfaces
        port = listening.getsockname()[1]
        self._store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening.detach()
        )
        self.device = device if on_gpus else torch.device("cpu")
        self._group: Any = None
        self.timeout_s = timeout_s
        self.memory: Tensor | None = None
        name, size = f"rft-{uuid.uuid4().hex}", len(devices) + 1
        self.rendezvous = Rendezvous(address, port, name, size, backend, secrets.token_hex(32))

    async def join(self, call: Coroutine[Any, Any, Any], first: Callable[[Any], None] | None) -> None:
        """Forms the group while a call lets the workers join.

        Args:
            first: what all members do first with the group, such as `check_token`; None: nothing.

        Raises:
            RequestFailed: the group was not formed; or what the call raises.
        """

        def join_group() -> None:
            about = self.rendezvous
            group = join(self._store, about.name, 0, about.size, about.backend, self.timeout_s, about.address)
            if first is not None:
                first(group)
            self._group = group

        await self._during(call, join_group)

    def check_token(self, group: Any) -> None:
        """Checks that all members have the token of the rendezvous. Raises RuntimeError where one has another."""
        about = self.rendezvous
        device = self.device if about.backend == "nccl" else torch.device("cpu")
        authenticate(group, 0, about.size, about.token, device, self.timeout_s)

    async def load(self, weights: WeightVersion, before: WeightVersion | None) -> None:
        if buckets := missing_tensors(weights, before):
            await self.send_buckets(buckets, before)

    @abstractmethod
    async def send_buckets(self, buckets: list[Bucket], before: WeightVersion | None) -> None:
        """Sends the tensors that the workers lack. Raises as `load`.

        Args:
            buckets: at least one.
            before: what the server has in memory, None where that is unknown.
        """

    def empty(self, length: int) -> Tensor:
        """Bytes (length,) uint8 for a message: the first ones of the shared memory, if there is some."""
        if self.memory is not None:
            return self.memory[:length]
        return torch.empty(length, dtype=torch.uint8, device=self.device)

    async def send(self, tensors: Iterable[Tensor], call: Coroutine[Any, Any, Any]) -> Any:
        """Broadcasts tensors, one after another, while a call lets the workers receive; returns what the call returns.

        Raises:
            RequestFailed: not all tensors were sent; or what the call raises.
        """
        group, memory = self._group, self.memory

        def broadcast_all() -> None:
            for tensor in tensors:
                if self._group is None:
                    break
                broadcast(group, tensor.to(self.device), self.timeout_s, memory)
                self.sent += tensor.nbytes

        return await self._during(call, broadcast_all)

    async def _during(self, call: Coroutine[Any, Any, Any], work: Callable[[], None]) -> Any:
        """Does blocking work in a thread while the server answers a call; returns the answer, or raises what failed."""
        answer, failure = await self._both(call, work)
        try:
            if failure is not None:
                raise failure
            return answer
        # A frame that an error passed through must not hold the error: the two would keep each other, and with them the
        # shared memory, until the garbage collector runs.
        finally:
            del failure

    async def _both(self, call: Coroutine[Any, Any, Any], work: Callable[[], None]) -> tuple[Any, BaseException | None]:
        """The answer to a call, and what failed of the two. Only its deadline ends the thread of the work, so it is a
        daemon: the end of this process does not wait for it."""
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()  # so that the thread can end it after this call

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except (RuntimeError, OSError, ValueError) as error:
                done.set_exception(RequestFailed(f"{self.client.name}: the process group with it: {error}"))

        threading.Thread(target=run, daemon=True, name=self.rendezvous.name).start()
        working = asyncio.wrap_future(done)
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait((answer, working), return_when=asyncio.FIRST_EXCEPTION)
            failures = (ended.exception() for ended in (answer, working) if ended.done())
            failure = next((error for error in failures if error is not None), None)
            return (answer.result() if failure is None else None), failure
        finally:
            answer.cancel()
            working.cancel()

    def close(self) -> None:
        """Leaves the group; the workers notice that their connections close."""
        if self.rendezvous.backend == "nccl" and self._group is not None:
            self._group.abort()
        self._group = None


def all_on_gpus(device: torch.device, devices: list[str]) -> bool:
    """Whether rank 0 and all workers have GPUs, so that their group can use NCCL."""
    return {device.type, *devices} == {"cuda"}
