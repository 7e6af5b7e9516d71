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
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from rft.remote.event_loop import call_in
from rft.remote.http_client import RequestFailed, ServerClient
from rft.rollout.server.options import Servers
from rft.rollout.server.remote.rft_receiver import (
    authenticate,
    broadcast,
    group_store,
    join,
    own_address,
)
from rft.rollout.server.remote.rft_shared_memory import Handle, SharedMemory

NCCL_ID = "0"  # the key under which torch writes the id of a group's first NCCL communicator
POLL_S = 0.01  # seconds between looks for it


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


MakeGroup = Callable[[list[str]], "BroadcastGroup"]  # from the device type of every worker
Join = Callable[[ServerClient, MakeGroup], Coroutine[Any, Any, "BroadcastGroup"]]


class BroadcastGroup:
    """The process group of rank 0 and the workers of one server.

    Args:
        client: of the server.
        devices: the device type of every worker.
        device: of rank 0. The group uses NCCL if all members have GPUs and share no memory, else gloo.
        timeout_s: deadline of the rendezvous, and of every bucket.
        deltas: the workers keep copies of the tensors, so that later only changed elements are sent.
        shares_memory: tensors go through memory of this machine.

    Attributes:
        device: where rank 0 holds a tensor while it is sent; shared memory is there too.
        timeout_s: see above.
        sent: bytes that have been sent.
        rendezvous: for the workers.
        copies: digests of the tensors that the workers have copies of, by name; None where they keep none.
    """

    def __init__(
        self,
        client: ServerClient,
        devices: list[str],
        device: torch.device,
        timeout_s: float,
        deltas: bool,
        shares_memory: bool,
    ) -> None:
        on_gpus = {device.type, *devices} == {"cuda"}
        backend = "nccl" if on_gpus and not shares_memory else "gloo"  # NCCL refuses two members on one GPU
        limit = timedelta(seconds=timeout_s)
        address = own_address(client.host, client.port)
        listening = socket.create_server((address, 0))  # TCPStore itself listens on all interfaces
        port = listening.getsockname()[1]
        self._store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listening.detach()
        )
        self._client = client
        self.device = device if on_gpus else torch.device("cpu")
        self._group: Any = None
        self._shares_memory = shares_memory
        self._memory: SharedMemory | None = None
        self.timeout_s = timeout_s
        self.sent = 0
        self.copies: dict[str, str] | None = {} if deltas else None
        name, size = f"rft-{uuid.uuid4().hex}", len(devices) + 1
        self.rendezvous = Rendezvous(address, port, name, size, backend, secrets.token_hex(32))

    async def join(self, call: Coroutine[Any, Any, Any], first: Callable[[Any], None] | None) -> Any:
        """Forms the group while a call lets the workers join; returns what the call returns.

        Args:
            first: what all members do first with the group: `check_token` or `warm_up`; None: nothing.

        Raises:
            RequestFailed: the group was not formed; or what the call raises.
        """

        def join_group() -> None:
            about = self.rendezvous
            group = join(self._store, about.name, 0, about.size, about.backend, self.timeout_s, about.address)
            if first is not None:
                first(group)
            self._group = group

        return await self._during(call, join_group)

    def check_token(self, group: Any) -> None:
        """Checks that all members have the token of the rendezvous. Raises RuntimeError where one has another."""
        about = self.rendezvous
        device = self.device if about.backend == "nccl" else torch.device("cpu")
        authenticate(group, 0, about.size, about.token, device, self.timeout_s)

    def warm_up(self, group: Any) -> None:
        """Sums one number of each member. Raises RuntimeError where a member does not take part."""
        group.allreduce([torch.zeros(1, device=self.device)]).wait(timedelta(seconds=self.timeout_s))

    async def nccl_id(self) -> bytes:
        """The id by which others join the group's NCCL communicator; waits until rank 0 begins its first collective."""
        store = group_store(self._store, self.rendezvous.name, "nccl")
        while not store.check([NCCL_ID]):
            await asyncio.sleep(POLL_S)
        return bytes(store.get(NCCL_ID))

    def share(self, size: int) -> list[Handle]:
        """Makes the memory through which `send` sends messages, one after another.

        Args:
            size: bytes of the largest message.

        Returns:
            A handle for each worker; nothing if the group itself sends.

        Raises:
            RequestFailed: there is not enough memory, or it cannot be shared.
        """
        if not self._shares_memory:
            return []
        try:
            self._memory = SharedMemory(size, self.device)
            return [self._memory.handle() for _ in range(self.rendezvous.size - 1)]
        except (RuntimeError, OSError) as error:
            raise RequestFailed(f"{self._client.name}: memory for its weights: {error}") from error

    def empty(self, length: int) -> Tensor:
        """Bytes (length,) uint8 for a message: the first ones of the memory of `share`, if there is some."""
        if self._memory is not None:
            return self._memory.data[:length]
        return torch.empty(length, dtype=torch.uint8, device=self.device)

    async def send(self, tensors: Iterable[Tensor], call: Coroutine[Any, Any, Any]) -> Any:
        """Broadcasts tensors, one after another, while a call lets the workers receive; returns what the call returns.
        Afterwards it releases the memory of `share`.

        Raises:
            RequestFailed: not all tensors were sent; or what the call raises.
        """
        group, memory = self._group, self._memory.data if self._memory is not None else None

        def broadcast_all() -> None:
            for tensor in tensors:
                if self._group is None:
                    break
                broadcast(group, tensor.to(self.device), self.timeout_s, memory)
                self.sent += tensor.nbytes

        try:
            return await self._during(call, broadcast_all)
        finally:
            self._release()

    async def _during(self, call: Coroutine[Any, Any, Any], work: Callable[[], None]) -> Any:
        """Does blocking work in a thread while the server answers a call; returns the answer, or raises what failed."""
        answer, failure = await self._both(call, work)
        try:
            if failure is not None:
                raise failure
            return answer
        # A frame that an error passed through must not hold the error: the two would keep each other, and with them the
        # memory of `share`, until Python's next garbage collection.
        finally:
            del failure

    async def _both(self, call: Coroutine[Any, Any, Any], work: Callable[[], None]) -> tuple[Any, BaseException | None]:
        """The answer to a call, and what failed of the two. Only its deadline ends the thread of the work, so it is a
        daemon: the end of this process does not wait for it."""
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
                error = RequestFailed(f"{self._client.name}: the process group with it: {found}")
            call_in(loop, settle, error)

        threading.Thread(target=run, daemon=True, name=self.rendezvous.name).start()
        answer = asyncio.ensure_future(call)
        try:
            await asyncio.wait((answer, done), return_when=asyncio.FIRST_EXCEPTION)
            failures = (ended.exception() for ended in (answer, done) if ended.done())
            failure = next((error for error in failures if error is not None), None)
            return (answer.result() if failure is None else None), failure
        finally:
            answer.cancel()
            done.cancel()

    def record_copies(self, digests: dict[str, str]) -> None:
        """Records that the workers have copies of tensors with these digests, if they keep copies."""
        if self.copies is not None:
            self.copies |= digests

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def close(self) -> None:
        """Leaves the group; the workers notice that their connections close."""
        self._release()
        if self.rendezvous.backend == "nccl" and self._group is not None:
            self._group.abort()
        self._group = None


class Connection:
    """The process group with one server, for as long as both ends work.

    Args:
        client: of the server.
        join: forms a group with it; see `ServerApi.join`.
        device: of rank 0.
        options: of the servers.
    """

    def __init__(self, client: ServerClient, join: Join, device: torch.device, options: Servers) -> None:
        def make(devices: list[str]) -> BroadcastGroup:
            return BroadcastGroup(client, devices, device, options.sync_s, options.deltas, options.transport == "ipc")

        self._join = partial(join, client, make)
        self._group: BroadcastGroup | None = None
        self._sent = 0

    async def group(self, fresh: bool) -> BroadcastGroup:
        """The group that exists, or a new one. Raises OSError where none can be formed.

        Args:
            fresh: the server was restarted or is in an unknown state: an existing group is closed.
        """
        if fresh:
            self.close()
        if self._group is None:
            self._group = await self._join()
        return self._group

    def sent(self) -> int:
        """Bytes that have been sent to the server."""
        return self._sent + (self._group.sent if self._group is not None else 0)

    def close(self) -> None:
        """Leaves the group, if there is one."""
        if self._group is not None:
            self._sent = self.sent()
            self._group.close()
            self._group = None
