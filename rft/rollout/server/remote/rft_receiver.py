"""The far end of a process group that weights come through, as a server's workers run it.

It needs torch alone, and lies in a folder of its own: a server that has this folder in its PYTHONPATH can import it
without the rest. `Receiver` is mixed into vLLM's worker (`--worker-extension-cls rft_receiver.Receiver`); rank zero of
the trainer joins by the same function.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

About = list[tuple[str, str, list[int]]]  # name, type and shape of every tensor of a bucket
WHOLE = -1  # in place of the number of a tensor's elements that travel
ALIGNED = 16  # bytes
CHUNK = 2**16  # words of 64 bits that a checksum takes at once: they stay in a cache
FACTOR = -7046029254386353131  # 2^64 divided by the golden ratio, as in multiplicative hashing


def join(store: Store, name: str, rank: int, size: int, backend: str, timeout_s: float) -> Any:
    """Joins a process group that is none of this process's others, with keys in the store as torch itself writes them.

    Args:
        backend: gloo or nccl.

    Raises:
        RuntimeError: the others do not come within the time.
    """
    store, timeout = PrefixStore(f"{name}/", PrefixStore(name, store)), timedelta(seconds=timeout_s)
    if backend == "gloo":
        return ProcessGroupGloo(PrefixStore("cpu/", store), rank, size, timeout=timeout)
    from torch.distributed import ProcessGroupNCCL  # not in builds for the CPU

    options = ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # its watchdog ends the process; `broadcast` raises first
    return ProcessGroupNCCL(PrefixStore("cuda/", store), rank, size, options)


def broadcast(group: Any, tensor: Tensor, timeout_s: float) -> None:
    """Hands a tensor of rank zero to all others. Raises RuntimeError where that fails, or takes longer."""
    group.broadcast([tensor], BroadcastOptions()).wait(timedelta(seconds=timeout_s))


def room(about: About, changed: list[int]) -> tuple[list[int], int]:
    """Where the tensors of a bucket begin, and its length: that of the last one's end, and a checksum of 8 bytes.

    Args:
        changed: elements of each tensor that travel, behind their places; or `WHOLE`.
    """
    starts, end = [], 0
    for (_, dtype, shape), count in zip(about, changed, strict=True):
        size = getattr(torch, dtype).itemsize
        starts.append(end)
        end += _aligned(prod(shape) * size) if count == WHOLE else _aligned(4 * count) + _aligned(count * size)
    return starts, end + 8


def pack(about: About, changed: list[int], parts: Iterable[Sequence[Tensor]], device: torch.device) -> Tensor:
    """The tensors of a bucket in one on a device, (bytes,) uint8.

    Args:
        parts: of each the whole, or the places (n,) int32 and the new values (n,) of the elements that have changed.
    """
    starts, length = room(about, changed)
    packed = torch.zeros(length, dtype=torch.uint8, device=device)
    for start, tensors in zip(starts, parts, strict=True):
        for tensor in tensors:
            packed[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
            start += _aligned(tensor.nbytes)
    return sealed(packed)


def sealed(data: Tensor) -> Tensor:
    """Bytes whose last eight are the checksum of the others."""
    data[-8:] = checksum(data[:-8]).view(torch.uint8)
    return data


def unpack(
    about: About, changed: list[int], packed: Tensor, copies: dict[str, Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket; those that come whole share its memory.

    Args:
        copies: of what came before, which are changed where elements come, and replaced otherwise; None: nothing is
            kept, and all tensors come whole.
    """
    for start, (name, dtype, shape), count in zip(room(about, changed)[0], about, changed, strict=True):
        kind = getattr(torch, dtype)
        if count == WHOLE:
            tensor = packed[start : start + prod(shape) * kind.itemsize].view(kind).view(shape)
            if copies is not None:
                copies[name] = tensor.to("cpu", copy=True)
        else:
            assert copies is not None
            places, begin = packed[start : start + 4 * count].view(torch.int32), start + _aligned(4 * count)
            tensor = copies[name]
            values = packed[begin : begin + count * kind.itemsize].view(kind)
            tensor.view(-1)[places.to("cpu", torch.int64)] = values.cpu()
        yield name, tensor


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def checksum(data: Tensor) -> Tensor:
    """Of bytes (8n,) on their device, (1,) int64: words with the high half folded in, each times an odd number, summed
    modulo 2^64."""
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    odd = (2 * torch.arange(CHUNK, device=data.device) + 1) * FACTOR
    for words in data.view(torch.int64).split(CHUNK):
        folded = words >> 32
        folded ^= words
        folded *= odd[: len(words)]
        total = total * FACTOR + folded.sum()
    return total


class Receiver:
    """What is added to a worker.

    Attributes:
        rank, device, reload_weights: the worker's own.
    """

    rank: int
    device: torch.device
    reload_weights: Callable[..., None]
    rft_group: Any = None
    rft_copies: dict[str, Tensor]

    def rft_join(self, address: str, port: int, name: str, size: int, backend: str, timeout_s: float) -> None:
        """Joins rank zero and the other workers, as one rank more than it has among them; leaves any group before."""
        self.rft_group, self.rft_copies = None, {}
        limit = timedelta(seconds=timeout_s)
        store = TCPStore(address, port, is_master=False, timeout=limit)
        self.rft_group = join(store, name, self.rank + 1, size, backend, timeout_s)

    def rft_receive(self, buckets: list[About], backend: str, timeout_s: float, deltas: bool) -> None:
        """Receives weights and loads them.

        Args:
            deltas: in front of each bucket comes how many elements of each tensor it has, and copies are kept.

        Raises:
            RuntimeError: they did not come, or not as they were sent. What is loaded is of no use then.
        """
        if self.rft_group is None:
            raise RuntimeError("it is in no process group")
        failures: list[str] = []
        # An iterator that raised would leave vLLM's loader in the middle, which the next load would stumble over.
        self.reload_weights(weights_iterator=self._rft_arriving(buckets, backend, timeout_s, deltas, failures))
        if failures:
            self.rft_group = None
            raise RuntimeError(failures[0])

    def _rft_arriving(
        self, buckets: list[About], backend: str, timeout_s: float, deltas: bool, failures: list[str]
    ) -> Iterator[tuple[str, Tensor]]:
        device = self.device if backend == "nccl" else torch.device("cpu")
        for number, about in enumerate(buckets):
            changed = [WHOLE] * len(about)
            try:
                if deltas:
                    changed = self._rft_take(8 * len(about) + 8, device, timeout_s)[:-8].view(torch.int64).tolist()
                packed = self._rft_take(room(about, changed)[1], device, timeout_s)
            except RuntimeError as error:
                failures.append(f"bucket {number} of {len(buckets)}: {error}")
                return
            yield from unpack(about, changed, packed, self.rft_copies if deltas else None)

    def _rft_take(self, length: int, device: torch.device, timeout_s: float) -> Tensor:
        """The next bytes (length,) uint8. Raises RuntimeError where they do not come, or not as they were sent."""
        data = torch.empty(length, dtype=torch.uint8, device=device)
        broadcast(self.rft_group, data, timeout_s)
        if not torch.equal(checksum(data[:-8]), data[-8:].view(torch.int64)):
            raise RuntimeError("it is not as it was sent")
        return data
