"""The receiving end of a process group for weights, as it runs in a server's workers. Where all are on one machine the
members may share memory: the bytes then go through it, and the group only says when.

It needs torch alone, and has a folder of its own: a server with this folder in PYTHONPATH imports it without the rest
of the package. `Receiver` is mixed into vLLM's worker (`--worker-extension-cls
rft_receiver.Receiver`). Rank 0 of the trainer joins with the same function, and the engine in the trainer's process
loads with the same one.
"""

import hashlib
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

if __package__:
    from rft.rollout.server.remote.rft_shared_memory import Handle, attach
else:  # in a server
    from rft_shared_memory import Handle, attach  # type: ignore[import-not-found, no-redef]

About = list[tuple[str, str, list[int]]]  # name, dtype and shape of every tensor of a bucket
WHOLE = -1  # instead of a number of changed elements: the whole tensor is sent
ALIGNED = 16  # bytes
CHECKSUM = 8  # bytes
CHUNK = 2**16  # words of 64 bits that the checksum processes at once, so that they stay in a cache
TOKEN_GROUP = "rft-token-"  # begins the name of a group for which SGLang's workers check a token
FACTOR = -7046029254386353131  # 2^64 divided by the golden ratio, as in multiplicative hashing


def own_address(address: str, port: int) -> str:
    """The address of this machine on the network interface that leads to another address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def join(store: Store, name: str, rank: int, size: int, backend: str, timeout_s: float, host: str) -> Any:
    """Joins a process group independent of torch's default one, with keys in the store as torch itself writes them.

    Args:
        backend: gloo or nccl.
        host: the address on which this process listens for the others, with gloo.

    Raises:
        RuntimeError: the other members do not join in time.
    """
    store, timeout = group_store(store, name, backend), timedelta(seconds=timeout_s)
    if backend == "gloo":
        how = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
        how._devices, how._timeout = [ProcessGroupGloo.create_device(hostname=host)], timeout
        return ProcessGroupGloo(store, rank, size, how)
    from torch.distributed import ProcessGroupNCCL  # not in builds for the CPU

    options = ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout  # its watchdog ends the process; `broadcast` raises first
    return ProcessGroupNCCL(store, rank, size, options)


def group_store(store: Store, name: str, backend: str) -> Store:
    """The part of a store in which a process group has its keys, as torch itself nests them."""
    device = {"gloo": "cpu", "nccl": "cuda"}[backend]
    return PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))


def authenticate(group: Any, rank: int, size: int, token: str, device: torch.device, timeout_s: float) -> None:
    """Checks that all members of a process group have a token. Each sends a digest of the token and its own rank, so
    that no member can send what another one sent.

    Raises:
        RuntimeError: a member has another token, or sends nothing in time.
    """
    expected = [hashlib.sha256(f"{member} {token}".encode()).digest() for member in range(size)]
    wanted = [torch.tensor(list(digest), dtype=torch.uint8, device=device) for digest in expected]
    received = [torch.empty_like(digest) for digest in wanted]
    group.allgather([received], [wanted[rank]]).wait(timedelta(seconds=timeout_s))
    for member, digests in enumerate(zip(wanted, received, strict=True)):
        if not torch.equal(*digests):
            raise RuntimeError(f"member {member} of the process group has another token")


def group_token(name: str, key: str) -> str:
    """The token of a group, made of its name and of the key of the server."""
    return f"{name} {key}"


def broadcast(group: Any, tensor: Tensor, timeout_s: float, memory: Tensor | None = None) -> None:
    """Sends a tensor from rank 0 to all others. Raises RuntimeError where that fails or exceeds the time.

    Args:
        memory: which all members have mapped, (m,) uint8, and in whose first bytes rank 0 has the tensor: the others
            copy it. The group must be one of gloo.
    """
    timeout = timedelta(seconds=timeout_s)
    if memory is None:
        group.broadcast([tensor], BroadcastOptions()).wait(timeout)
        return
    _synchronize(memory)
    group.barrier(BarrierOptions()).wait(timeout)  # rank 0 has written
    if group.rank() != 0:
        tensor.copy_(memory[: len(tensor)])
        _synchronize(memory, tensor)
    group.barrier(BarrierOptions()).wait(timeout)  # all others have read


def _synchronize(*tensors: Tensor) -> None:
    """Waits for the GPUs of tensors, which a barrier of gloo does not."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def room(about: About, changed: list[int]) -> tuple[list[int], int]:
    """Offsets of the tensors of a bucket, and the length of the bucket with its checksum.

    Args:
        changed: for each tensor the number of changed elements that are sent, after their positions; or `WHOLE`.
    """
    starts, end = [], 0
    for (_, dtype, shape), count in zip(about, changed, strict=True):
        size = getattr(torch, dtype).itemsize
        starts.append(end)
        end += _aligned(prod(shape) * size) if count == WHOLE else _aligned(4 * count) + _aligned(count * size)
    return starts, end + CHECKSUM


def pack(about: About, changed: list[int], parts: Iterable[Sequence[Tensor]], packed: Tensor) -> Tensor:
    """Packs the tensors of a bucket into one.

    Args:
        parts: of each tensor the whole, or positions (n,) int32 and new values (n,) of changed elements.
        packed: is filled and returned, (bytes,) uint8, as long as `room` says; with or without room for the checksum.
    """
    starts, _ = room(about, changed)
    for start, tensors in zip(starts, parts, strict=True):
        for tensor in tensors:
            packed[start : start + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
            start += _aligned(tensor.nbytes)
    return packed


def sealed(data: Tensor) -> Tensor:
    """Writes the checksum of the other bytes into the last ones."""
    data[-CHECKSUM:] = checksum(data[:-CHECKSUM]).view(torch.uint8)
    return data


def unpack(
    about: About, changed: list[int], packed: Tensor, copies: dict[str, Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket; those that were sent whole share its memory.

    Args:
        copies: of the tensors received before; updated in place. None: no copies are kept, and all tensors are sent
            whole.
    """
    for start, (name, dtype, shape), count in zip(room(about, changed)[0], about, changed, strict=True):
        kind = getattr(torch, dtype)
        if count == WHOLE:
            tensor = packed[start : start + prod(shape) * kind.itemsize].view(kind).view(shape)
            if copies is not None:
                copies[name] = tensor.to("cpu", copy=True)
        else:
            assert copies is not None
            positions, begin = packed[start : start + 4 * count].view(torch.int32), start + _aligned(4 * count)
            tensor = copies[name]
            values = packed[begin : begin + count * kind.itemsize].view(kind)
            tensor.view(-1)[positions.to("cpu", torch.int64)] = values.cpu()
        yield name, tensor


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def checksum(data: Tensor) -> Tensor:
    """The checksum (1,) int64 of bytes (8n,), on their device: words with the high half folded in, each times an odd
    number, summed modulo 2^64."""
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    odd = (2 * torch.arange(CHUNK, device=data.device) + 1) * FACTOR
    for words in data.view(torch.int64).split(CHUNK):
        folded = words >> 32
        folded ^= words
        folded *= odd[: len(words)]
        total = total * FACTOR + folded.sum()
    return total


class PackExperts:
    """Replaces how a layer of experts is prepared after a load, where vLLM computes on a CPU.

    vLLM packs experts for the CPU at the first load only, so the experts of every later load would be wrong.

    Args:
        method: the `quant_method` of the layer.
    """

    def __init__(self, method: Any) -> None:
        self._packed = False
        self._prepare, self._pack = method.process_weights_after_loading, method.moe_kernel.fused_experts
        self._own_pack = self._pack.process_weights_after_loading
        self._pack.process_weights_after_loading = self._pack_layer

    def __call__(self, layer: Any) -> None:
        self._packed = False
        self._prepare(layer)
        if not self._packed:  # a later vLLM may do it itself
            self._pack_layer(layer)

    def _pack_layer(self, layer: Any) -> None:
        self._packed = True
        self._own_pack(layer)


def pack_experts(model: Any) -> None:
    """Lets vLLM pack experts for the CPU after every load; see `PackExperts`.

    Raises:
        ValueError: the experts are quantised, and this cannot be done.
    """
    for layer in model.modules():
        if "RoutedExperts" in [kind.__name__ for kind in type(layer).__mro__]:  # not imported: see the top
            method = layer.quant_method
            if type(method).__name__ != "UnquantizedFusedMoEMethod":
                raise ValueError(
                    f"on a CPU quantised experts ({type(method).__name__}) are packed at the first load only, so later "
                    "weights would be wrong: take the quantisation out of the model, or choose rollout=hf"
                )
            if not isinstance(method.process_weights_after_loading, PackExperts):
                method.process_weights_after_loading = PackExperts(method)


def load_weights(worker: Any, **source: Any) -> list[str]:
    """Loads new weights into a worker of vLLM.

    Args:
        source: an argument of `reload_weights`: `weights_path` or `weights_iterator`.

    Returns:
        The parameters that got no weights, sorted. vLLM itself only logs them. Empty for a quantised model, whose
        parameters are not those that are sent.

    Raises:
        ValueError: see `pack_experts`.
    """
    model: Any = worker.get_model()
    loaded: set[str] = set()
    if worker.device.type == "cpu":
        pack_experts(model)
    wanted = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}  # with adapters

    def load(weights: Iterable[tuple[str, Tensor]]) -> Any:
        names = type(model).load_weights(model, weights)
        loaded.update(wanted if names is None else names)
        return names

    model.load_weights = load
    try:
        worker.reload_weights(**source)
    finally:
        del model.load_weights
    return sorted(wanted - loaded) if worker.model_config.quantization is None else []


class Receiver:
    """A mixin for the worker of a server.

    Attributes:
        rank, device, model_config: the worker's own.
    """

    rank: int
    device: torch.device
    model_config: Any
    rft_group: Any = None
    rft_memory: Tensor | None = None
    rft_copies: dict[str, Tensor]

    def rft_join(
        self, address: str, port: int, name: str, size: int, backend: str, token: str, timeout_s: float
    ) -> None:
        """Joins rank 0 and the other workers, as the worker's rank plus one; leaves any earlier group."""
        self.rft_group, self.rft_copies, self.rft_memory = None, {}, None
        limit = timedelta(seconds=timeout_s)
        store = TCPStore(address, port, is_master=False, timeout=limit)
        group = join(store, name, self.rank + 1, size, backend, timeout_s, own_address(address, port))
        device = self.device if backend == "nccl" else torch.device("cpu")
        authenticate(group, self.rank + 1, size, token, device, timeout_s)
        self.rft_group = group

    def rft_map(self, handles: list[Handle]) -> None:
        """Maps memory of rank 0, through which the next weights come.

        Args:
            handles: one for each worker.

        Raises:
            RuntimeError: this worker cannot map it; names the cause and the cure.
        """
        self.rft_memory = attach(handles[self.rank])

    def rft_attends_ahead(self) -> list[str]:
        """The architecture of the model if each token of a medium attends to all of it; otherwise nothing."""
        return [self.model_config.architecture] if self.model_config.is_mm_prefix_lm else []

    def rft_load(self, **source: Any) -> list[str]:
        """Loads weights by `load_weights`."""
        return load_weights(self, **source)

    def rft_receive(self, buckets: list[About], backend: str, timeout_s: float, deltas: bool) -> list[str]:
        """Receives weights and loads them. Afterwards it releases the memory of `rft_map`.

        Args:
            deltas: each bucket is preceded by the numbers of changed elements, and copies are kept.

        Returns:
            The parameters that got no weights.

        Raises:
            RuntimeError: they did not arrive, or were damaged. The loaded weights are unusable then.
        """
        if self.rft_group is None:
            raise RuntimeError("it is in no process group")
        memory, self.rft_memory = self.rft_memory, None
        on_gpu = backend == "nccl" or (memory is not None and memory.is_cuda)
        device = self.device if on_gpu else torch.device("cpu")
        failures: list[str] = []

        def take(length: int) -> Tensor:
            """The next bytes (length,) uint8. Raises RuntimeError where they do not arrive, or are damaged."""
            data = torch.empty(length, dtype=torch.uint8, device=device)
            broadcast(self.rft_group, data, timeout_s, memory)
            if not torch.equal(checksum(data[:-CHECKSUM]), data[-CHECKSUM:].view(torch.int64)):
                raise RuntimeError("it is not as it was sent")
            return data

        # An iterator that raises would interrupt vLLM's loader in a state in which the next load fails.
        missing = self.rft_load(weights_iterator=self._rft_arriving(buckets, take, deltas, failures))
        if failures:
            self.rft_group = None
            raise RuntimeError(failures[0])
        return missing

    def _rft_arriving(
        self, buckets: list[About], take: Callable[[int], Tensor], deltas: bool, failures: list[str]
    ) -> Iterator[tuple[str, Tensor]]:
        for number, about in enumerate(buckets):
            changed = [WHOLE] * len(about)
            try:
                if deltas:
                    changed = take(8 * len(about) + CHECKSUM)[:-CHECKSUM].view(torch.int64).tolist()
                packed = take(room(about, changed)[1])
            except RuntimeError as error:
                failures.append(f"bucket {number} of {len(buckets)}: {error}")
                return
            yield from unpack(about, changed, packed, self.rft_copies if deltas else None)
