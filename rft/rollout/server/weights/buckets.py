"""The tensors that a server lacks, in buckets that are sent as one message each: all, or the elements that changed."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rft.rollout.server.remote.rft_receiver import WHOLE, About, pack, room, sealed
from rft.rollout.server.weights.broadcast import BroadcastGroup
from rft.rollout.server.weights.deltas import changed_elements, sparse_delta
from rft.rollout.server.weights.version import StoredTensor, WeightVersion

BUCKET = 2**28


@dataclass(frozen=True)
class Bucket:
    """Tensors of a version that are sent together."""

    weights: WeightVersion
    names: list[str]

    def about(self) -> About:
        """Names, dtypes and shapes."""
        stored = [(name, self.weights.tensors[name]) for name in self.names]
        return [(name, str(tensor.dtype).removeprefix("torch."), tensor.shape) for name, tensor in stored]

    def size(self) -> int:
        """Bytes of the message that holds all tensors whole."""
        return room(self.about(), [WHOLE] * len(self.names))[1]

    def digests(self) -> dict[str, str]:
        """The digest of each tensor by its name."""
        return {name: self.weights.tensors[name].digest for name in self.names}

    def tensors(self) -> Iterator[Tensor]:
        """Reads the tensors from their files, one after another."""
        return (self.weights.read(name) for name in self.names)

    def messages(self, before: WeightVersion | None, group: BroadcastGroup) -> Iterator[Tensor]:
        """The messages to `Receiver`: with copies the counts of changed elements, then the packed tensors.

        Args:
            before: what the workers have, None where that is unknown.
            group: of the workers, which may have copies.
        """
        about, copies = self.about(), group.copies
        if copies is None:
            whole = [WHOLE] * len(about)
            packed = pack(about, whole, ((tensor,) for tensor in self.tensors()), group.empty(room(about, whole)[1]))
            yield sealed(packed)
            return
        parts = [self._part(name, before, copies) for name in self.names]
        changed = [changed_elements(part) for part in parts]
        yield sealed(torch.tensor([*changed, 0]).view(torch.uint8).to(group.device))
        yield sealed(pack(about, changed, parts, group.empty(room(about, changed)[1])))

    def _part(self, name: str, before: WeightVersion | None, copies: dict[str, str]) -> tuple[Tensor, ...]:
        new, stored = self.weights.read(name), self.weights.tensors[name]
        if before is None or name not in before.tensors or not before.folder.exists():
            return (new,)
        old = before.tensors[name]
        if (old.dtype, old.shape, old.digest) != (stored.dtype, stored.shape, copies.get(name)):
            return (new,)
        return sparse_delta(new, before.read(name))


def missing_tensors(weights: WeightVersion, before: WeightVersion | None) -> list[Bucket]:
    """The tensors that a server lacks.

    A layer with any changed tensor is sent whole: engines fuse some tensors of a layer (queries, keys and values, for
    example) and load their parts together.

    Args:
        before: what the server has, None where that is unknown.
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
            size = weights.tensors[name].nbytes
            if not buckets or size > room:
                buckets.append(Bucket(weights, []))
                room = BUCKET
            buckets[-1].names.append(name)
            room -= size
    return buckets


def _same(weights: WeightVersion, held: dict[str, StoredTensor], name: str) -> bool:
    return name in held and held[name].equals(weights.tensors[name])


def _layer(name: str) -> str:
    """The layer of a tensor: `model.layers.3` of `model.layers.3.mlp.up_proj.weight`; outside of layers its module."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1] or parts)
