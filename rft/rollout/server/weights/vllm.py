"""Weights to vLLM's servers: from their folder, or to `Receiver` in the workers, over a process group or through memory
of the machine; and the choice between these and vLLM's own transfer.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rft.remote.http_client import RequestFailed, ServerClient
from rft.rollout.engine.vllm_checks import check_loaded
from rft.rollout.server.options import KEY, Servers
from rft.rollout.server.remote.rft_receiver import WHOLE, pack, room, sealed
from rft.rollout.server.remote.rft_shared_memory import SharedMemory
from rft.rollout.server.server_api import REMOTE
from rft.rollout.server.weights.broadcast import GroupTransport
from rft.rollout.server.weights.buckets import Bucket
from rft.rollout.server.weights.deltas import changed_elements, sparse_delta
from rft.rollout.server.weights.transport import WeightTransport
from rft.rollout.server.weights.version import WeightVersion
from rft.rollout.server.weights.vllm_transfer import FLAG, VLLMTransfer, has_transfer

RECEIVER = "rft_receiver.Receiver"
WITH_RECEIVER = f"start it with --worker-extension-cls {RECEIVER} and PYTHONPATH={REMOTE}, or by mode=serve"


async def call_workers(client: ServerClient, method: str, **arguments: Any) -> list[Any]:
    """Calls a method of every worker of a server and returns the results."""
    return (await client.post("/collective_rpc", {"method": method, **arguments}))["results"]


def has_receiver(config: Any) -> bool:
    """True if the workers of a server were started with `Receiver`.

    Args:
        config: the options of the server.
    """
    return RECEIVER.rpartition(".")[0] in config["parallel_config"]["worker_extension_cls"]


class VLLMFolder(WeightTransport):
    """The workers read the files of a version.

    Args:
        client: of the server.
        config: the options of the server.
    """

    def __init__(self, client: ServerClient, config: Any) -> None:
        super().__init__(client)
        self._config = config

    async def load(self, weights: WeightVersion, before: WeightVersion | None) -> None:
        received = has_receiver(self._config)
        experts = any(".experts." in name for name in weights.tensors)
        if experts and not received and self._config["device_config"]["device"] == "cpu":
            raise self.client.bad_response(
                f"on a CPU vLLM alone samples from wrong experts once it gets new weights: {WITH_RECEIVER}"
            )
        # vLLM reads no files into a model that it started with dummy weights, unless it gets another format.
        await call_workers(self.client, "update_config", args=[{"load_config": {"load_format": "safetensors"}}])
        method = "rft_load" if received else "reload_weights"
        missing = await call_workers(self.client, method, kwargs={"weights_path": str(weights.folder)})
        check_loaded(self.client, missing)


class VLLMGroup(GroupTransport):
    """Sends the tensors that the workers lack to their `Receiver`."""

    deltas: ClassVar[bool] = False

    async def open(self) -> None:
        arguments = vars(self.rendezvous) | {"timeout_s": self.timeout_s}
        await self.join(call_workers(self.client, "rft_join", kwargs=arguments), self.check_token)

    async def send_buckets(self, buckets: list[Bucket], before: WeightVersion | None) -> None:
        arguments = {"backend": self.rendezvous.backend, "timeout_s": self.timeout_s, "deltas": self.deltas}
        arguments |= {"buckets": [bucket.about() for bucket in buckets]}
        messages = (message for bucket in buckets for message in self.messages(bucket, before))
        missing = await self.send(messages, call_workers(self.client, "rft_receive", kwargs=arguments))
        if before is None:  # else only the layers that have changed are sent
            check_loaded(self.client, missing)

    def messages(self, bucket: Bucket, before: WeightVersion | None) -> Iterator[Tensor]:
        """The messages to `Receiver` for a bucket.

        Args:
            before: what the workers have, None where that is unknown.
        """
        yield self.packed(bucket, [WHOLE] * len(bucket.names), ((tensor,) for tensor in bucket.tensors()))

    def packed(self, bucket: Bucket, changed: list[int], parts: Iterable[Sequence[Tensor]]) -> Tensor:
        """The tensors of a bucket, or their changed elements, as one message; see `pack`."""
        about = bucket.about()
        return sealed(pack(about, changed, parts, self.empty(room(about, changed)[1])))


class VLLMDeltas(VLLMGroup):
    """Lets the workers keep copies of the tensors, and sends only the elements that have changed since."""

    deltas = True
    _copies: dict[str, str]  # digests of the tensors that the workers have copies of, by name

    async def open(self) -> None:
        await super().open()
        self._copies = {}

    async def send_buckets(self, buckets: list[Bucket], before: WeightVersion | None) -> None:
        await super().send_buckets(buckets, before)
        tensors = buckets[0].weights.tensors
        self._copies |= {name: tensors[name].digest for bucket in buckets for name in bucket.names}

    def messages(self, bucket: Bucket, before: WeightVersion | None) -> Iterator[Tensor]:
        """The counts of changed elements, then the packed tensors."""
        parts = [self._part(bucket.weights, name, before) for name in bucket.names]
        changed = [changed_elements(part) for part in parts]
        yield sealed(torch.tensor([*changed, 0]).view(torch.uint8).to(self.device))
        yield self.packed(bucket, changed, parts)

    def _part(self, weights: WeightVersion, name: str, before: WeightVersion | None) -> tuple[Tensor, ...]:
        new, stored = weights.read(name), weights.tensors[name]
        if before is None or name not in before.tensors or not before.folder.exists():
            return (new,)
        old = before.tensors[name]
        if (old.dtype, old.shape, old.digest) != (stored.dtype, stored.shape, self._copies.get(name)):
            return (new,)
        return sparse_delta(new, before.read(name))


class VLLMSharedMemory(VLLMGroup):
    """Sends the tensors through memory that rank 0 shares with the workers, which are on its machine; the group only
    says when.
    """

    shares_memory = True

    async def send_buckets(self, buckets: list[Bucket], before: WeightVersion | None) -> None:
        try:
            memory = SharedMemory(max(bucket.size() for bucket in buckets), self.device)
            handles = [memory.handle() for _ in range(self.rendezvous.size - 1)]
        except (RuntimeError, OSError) as error:
            raise RequestFailed(f"{self.client.name}: memory for its weights: {error}") from error
        try:
            await call_workers(self.client, "rft_map", kwargs={"handles": handles})
            self.memory = memory.data
            await super().send_buckets(buckets, before)
        finally:
            self.memory = None
            memory.close()


def choose_transport(client: ServerClient, config: Any, options: Servers, device: torch.device) -> WeightTransport:
    """The transport that the options ask for, and that a server was started for.

    Args:
        config: the options of the server.
        options: of all servers of the run.
        device: of rank 0.

    Raises:
        BadResponse: the server cannot get weights like this; names the cure.
    """
    if options.transport == "folder":
        return VLLMFolder(client, config)
    workers = config["parallel_config"]
    if workers["data_parallel_size"] != 1:
        raise client.bad_response(f"it has data_parallel_size above 1; set {KEY}.transport=folder")
    devices = [config["device_config"]["device"]] * workers["world_size"]
    kind: type[GroupTransport]
    if has_receiver(config):
        kind = VLLMDeltas if options.deltas else {"group": VLLMGroup, "ipc": VLLMSharedMemory}[options.transport]
    elif has_transfer(config, device, devices) and (options.transport, options.deltas) == ("group", False):
        kind = VLLMTransfer
    else:
        raise client.bad_response(
            f"its workers cannot join a process group: {WITH_RECEIVER}; or, where rank 0 and its workers have GPUs of "
            f"their own and {KEY}.deltas is false, start it with {FLAG} and set {KEY}.transport=group; or set "
            f"{KEY}.transport=folder"
        )
    return kind(client, devices, device, options.sync_s)
