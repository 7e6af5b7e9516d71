"""vLLM's own weight transfer over NCCL, for servers whose workers have no `Receiver`.

The workers of a server that is started with `FLAG` join a communicator by the id that NCCL gave it, and load what rank
0 broadcasts. Rank 0 needs no vLLM: its end is a process group of torch.

A worker that waits in NCCL cannot be interrupted. If a broadcast fails, rank 0 aborts its end, and the worker may wait
until its server is restarted. If the workers do not join, a thread of rank 0 waits for them until the process ends.
"""

import asyncio
import base64
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rft.remote.http_client import RequestRefused
from rft.rollout.server.remote.rft_receiver import group_store
from rft.rollout.server.weights.broadcast import GroupTransport, all_on_gpus
from rft.rollout.server.weights.buckets import Bucket
from rft.rollout.server.weights.version import WeightVersion

FLAG = """--weight-transfer-config '{"backend": "nccl"}'"""
UNLIMITED = 2**62  # bytes of a message, so that vLLM's workers expect a bucket in one
NCCL_ID = "0"  # the key under which torch writes the id of a group's first NCCL communicator
POLL_S = 0.01  # seconds between looks for it


def has_transfer(config: Any, device: torch.device, devices: list[str]) -> bool:
    """True if a server was started with `FLAG`, and its workers and rank 0 have GPUs.

    Args:
        config: the options of the server.
        device: of rank 0.
        devices: the device type of every worker.
    """
    transfer = config.get("weight_transfer_config")  # older servers lack it
    return transfer is not None and transfer["backend"] == "nccl" and all_on_gpus(device, devices)


class VLLMTransfer(GroupTransport):
    """Sends the tensors that the workers lack, whole. The group must be one of NCCL."""

    async def open(self) -> None:
        """Lets the workers join the group; they leave an earlier one."""
        with suppress(RequestRefused):  # an interrupted update is open, which `send_buckets` ends
            await self.client.post("/shutdown_weight_transfer_engine")
        await self.join(self._initialize(), self._warm_up)  # the first collective of vLLM's workers

    async def _initialize(self) -> None:
        about = {"nccl_unique_id_b64": base64.b64encode(await self._nccl_id()).decode()}
        members = {"rank_offset": 1, "world_size": self.rendezvous.size}
        how = {"packed": True, "packed_buffer_size_bytes": UNLIMITED}
        await self.client.post("/init_weight_transfer_engine", {"init_info": about | members | how})

    async def _nccl_id(self) -> bytes:
        """The id by which others join the group's NCCL communicator; waits until rank 0 begins its first collective."""
        store = group_store(self._store, self.rendezvous.name, "nccl")
        while not store.check([NCCL_ID]):
            await asyncio.sleep(POLL_S)
        return bytes(store.get(NCCL_ID))

    def _warm_up(self, group: Any) -> None:
        """Sums one number of each member. Raises RuntimeError where a member does not take part."""
        group.allreduce([torch.zeros(1, device=self.device)]).wait(timedelta(seconds=self.timeout_s))

    async def send_buckets(self, buckets: list[Bucket], before: WeightVersion | None) -> None:
        """Sends buckets, which hold whole layers: a layer of which nothing is sent keeps its weights."""
        if not self.sent:  # an update of an earlier group may have ended anywhere: its half-loaded layers are joined
            with suppress(RequestRefused):  # it is still open
                await self.client.post("/start_weight_update")
            await self.client.post("/finish_weight_update")
        await self.client.post("/start_weight_update")
        for bucket in map(aligned, buckets):
            names, dtypes, shapes = zip(*bucket.about(), strict=True)
            about = {"names": names, "dtype_names": dtypes, "shapes": shapes}
            call = self.client.post("/update_weights", {"update_info": about})
            await self.send(self._messages(bucket), call)
        await self.client.post("/finish_weight_update")

    def _messages(self, bucket: Bucket) -> Iterator[Tensor]:
        """The only message of a bucket: the bytes of its tensors, one after another, (n,) uint8."""
        sizes = [bucket.weights.tensors[name].nbytes for name in bucket.names]
        packed = self.empty(sum(sizes))
        for part, tensor in zip(packed.split(sizes), bucket.tensors(), strict=True):
            part.copy_(tensor.reshape(-1).view(torch.uint8))
        yield packed


def aligned(bucket: Bucket) -> Bucket:
    """A bucket with its tensors in the order of their element sizes, the largest first: vLLM leaves no gaps between
    tensors, and each must begin at a multiple of its element size."""
    tensors = bucket.weights.tensors
    return Bucket(bucket.weights, sorted(bucket.names, key=lambda name: -tensors[name].dtype.itemsize))
