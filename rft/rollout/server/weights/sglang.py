"""Weights to SGLang's servers, from their folder or over a process group, and the labels of a server's weights."""

from dataclasses import replace
from enum import StrEnum
from typing import Any

import torch

from rft.remote.http_client import ServerClient
from rft.rollout.server.remote.rft_receiver import TOKEN_GROUP, group_token
from rft.rollout.server.weights.broadcast import GroupTransport
from rft.rollout.server.weights.buckets import Bucket
from rft.rollout.server.weights.transport import WeightTransport
from rft.rollout.server.weights.version import WeightVersion


class Label(StrEnum):
    """Labels of a server's weights that are not a version.

    Attributes:
        NEW: SGLang's own, before the first update.
        LOADING: between two versions; the server may be paused.
        UNSURE: while the server releases or allocates memory.
        ASLEEP: paused, without memory for weights, keys and values.
        WEIGHTS_ONLY: paused, without memory for keys and values.
    """

    NEW = "default"
    LOADING = "loading"
    UNSURE = "unsure"
    ASLEEP = "asleep"
    WEIGHTS_ONLY = "dozing"


PAUSED = frozenset((Label.LOADING, Label.ASLEEP, Label.WEIGHTS_ONLY))  # with these a server may be paused


async def read_label(client: ServerClient) -> str:
    """The label of a server's weights."""
    return str((await client.get("/model_info"))["weight_version"])


async def set_label(client: ServerClient, label: str, abort: bool = False) -> None:
    """Sets the label of a server's weights.

    Args:
        abort: running requests are aborted, too.
    """
    await client.post("/update_weight_version", {"new_version": label, "abort_all_requests": abort})


class SGLangFolder(WeightTransport):
    """The server reads the files of a version, in one atomic request, which also sets the label unless the server is
    paused."""

    async def load(self, weights: WeightVersion, before: WeightVersion | None) -> None:
        body: dict[str, Any] = {"model_path": str(weights.folder), "load_format": "auto"}
        body |= {"abort_all_requests": True, "flush_cache": True}
        if await read_label(self.client) not in PAUSED:
            body["weight_version"] = str(weights.version)
        answer = await self.client.post("/update_weights_from_disk", body)
        if answer["success"] is not True:
            raise self.client.bad_response(f"it did not load the weights of {weights.folder}: {answer['message']}")


class SGLangGroup(GroupTransport):
    """Sends the tensors that the workers lack, whole and bucket by bucket; samples between two of them carry a label
    that is not a version.

    Args:
        checked: the workers check the token of the group; see `rft_sglang_plugin`. The server has a key then.
    """

    def __init__(
        self, client: ServerClient, devices: list[str], device: torch.device, timeout_s: float, checked: bool
    ) -> None:
        super().__init__(client, devices, device, timeout_s)
        self._checked = checked
        if checked:
            name = f"{TOKEN_GROUP}{self.rendezvous.name}"
            self.rendezvous = replace(self.rendezvous, name=name, token=group_token(name, str(client.key)))

    async def open(self) -> None:
        group = self.rendezvous
        body = {"master_address": group.address, "master_port": group.port, "group_name": group.name}
        body |= {"world_size": group.size, "rank_offset": 1, "backend": group.backend}
        first = self.check_token if self._checked else None
        await self.join(self.client.post("/init_weights_update_group", body), first)

    async def load(self, weights: WeightVersion, before: WeightVersion | None) -> None:
        if await read_label(self.client) != Label.WEIGHTS_ONLY:
            await set_label(self.client, Label.LOADING, abort=True)
        await super().load(weights, before)

    async def send_buckets(self, buckets: list[Bucket], before: WeightVersion | None) -> None:
        for bucket in buckets:
            names, dtypes, shapes = zip(*bucket.about(), strict=True)
            body = {"group_name": self.rendezvous.name, "names": names, "dtypes": dtypes, "shapes": shapes}
            call = self.client.post("/update_weights_from_distributed", body | {"abort_all_requests": True})
            await self.send(bucket.tensors(), call)
