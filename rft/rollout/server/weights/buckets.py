"""The tensors that a server lacks, in buckets of a bounded size."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rft.rollout.server.remote.rft_receiver import WHOLE, About, room
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

    def tensors(self) -> Iterator[Tensor]:
        """Reads the tensors from their files, one after another."""
        return (self.weights.read(name) for name in self.names)


def missing_tensors(weights: WeightVersion, before: WeightVersion | None) -> list[Bucket]:
    """The tensors that a server lacks.

    A layer with any changed tensor is sent whole: engines fuse some tensors of a layer (queries, keys and values, for
    example) and load their parts together.

    Args:
        before: what the server has, None where that is unknown.
    """
    held: dict[str, StoredTensor] = before.tensors if before is not None else {}
    layers: dict[str, list[str]] = {}
    for name in weights.tensors:
        layers.setdefault(_layer(name), []).append(name)
    buckets: list[Bucket] = []
    room = 0
    for names in layers.values():
        if all(weights.tensors[name].equals(held.get(name)) for name in names):
            continue
        for name in names:
            size = weights.tensors[name].nbytes
            if not buckets or size > room:
                buckets.append(Bucket(weights, []))
                room = BUCKET
            buckets[-1].names.append(name)
            room -= size
    return buckets


def _layer(name: str) -> str:
    """The layer of a tensor: `model.layers.3` of `model.layers.3.mlp.up_proj.weight`; outside of layers its module."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1] or parts)
