"""vLLM's own weight transfer over NCCL, for servers whose workers have no `Receiver`.

The workers of a server that is started with `FLAG` join a communicator by the id that NCCL gave it, and load what rank
0 broadcasts. Rank 0 needs no vLLM: its end is a process group of torch.

A worker that waits in NCCL cannot be interrupted. If a broadcast fails, rank 0 aborts its end, and the worker may wait
until its server is restarted. If the workers do not join, a thread of rank 0 waits for them until the process ends.
"""

import base64
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rft.remote.http_client import RequestRefused, ServerClient
from rft.rollout.server.weights.broadcast import BroadcastGroup
from rft.rollout.server.weights.buckets import Bucket

FLAG = """--weight-transfer-config '{"backend": "nccl"}'"""
UNLIMITED = 2**62  # bytes of a message, so that vLLM's workers expect a bucket in one


def possible(config: Any, group: BroadcastGroup) -> bool:
    """True if a server was started with `FLAG`, and the group is one of NCCL without copies for changed elements.

    Args:
        config: the options of the server.
    """
    transfer = config.get("weight_transfer_config")  # older servers lack it
    started = transfer is not None and transfer["backend"] == "nccl"
    return started and group.rendezvous.backend == "nccl" and group.copies is None


async def join(client: ServerClient, group: BroadcastGroup) -> None:
    """Lets the workers of a server join the group; they leave an earlier one. Raises as `BroadcastGroup.join`."""
    with suppress(RequestRefused):  # an interrupted update is open, which `send` ends
        await client.post("/shutdown_weight_transfer_engine")
    await group.join(_initialize(client, group), group.warm_up)  # the first collective of vLLM's workers


async def _initialize(client: ServerClient, group: BroadcastGroup) -> None:
    about = {"nccl_unique_id_b64": base64.b64encode(await group.nccl_id()).decode()}
    place = {"rank_offset": 1, "world_size": group.rendezvous.size}
    how = {"packed": True, "packed_buffer_size_bytes": UNLIMITED}
    await client.post("/init_weight_transfer_engine", {"init_info": about | place | how})


async def send(client: ServerClient, group: BroadcastGroup, buckets: list[Bucket]) -> None:
    """Sends tensors to a paused server, which loads them.

    Args:
        buckets: hold whole layers: a layer of which nothing is sent keeps its weights.
    """
    if not group.sent:  # an update of an earlier group may have ended anywhere: its half-loaded layers are put together
        with suppress(RequestRefused):  # it is still open
            await client.post("/start_weight_update")
        await client.post("/finish_weight_update")
    await client.post("/start_weight_update")
    for bucket in map(aligned, buckets):
        names, dtypes, shapes = zip(*bucket.about(), strict=True)
        about = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        await group.send(messages(bucket, group), client.post("/update_weights", {"update_info": about}))
    await client.post("/finish_weight_update")


def aligned(bucket: Bucket) -> Bucket:
    """A bucket with its tensors in the order of their element sizes, the largest first: vLLM leaves no gaps between
    tensors, and each must begin at a multiple of its element size."""
    tensors = bucket.weights.tensors
    return Bucket(bucket.weights, sorted(bucket.names, key=lambda name: -tensors[name].dtype.itemsize))


def messages(bucket: Bucket, group: BroadcastGroup) -> Iterator[Tensor]:
    """The only message of a bucket: the bytes of its tensors, one after another, (n,) uint8."""
    sizes = [bucket.weights.tensors[name].nbytes for name in bucket.names]
    packed = group.empty(sum(sizes))
    for part, tensor in zip(packed.split(sizes), bucket.tensors(), strict=True):
        part.copy_(tensor.reshape(-1).view(torch.uint8))
    yield packed
