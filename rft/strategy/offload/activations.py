"""Activations of blocks in host memory between the forward and the backward pass."""

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from rft.batch.device import to_host
from rft.strategy.base import OFFLOADED_ACTIVATIONS
from rft.strategy.gather import to_local


class ActivationOffload:
    """Copies what the blocks of a network keep for the backward pass to host memory, and back.

    On a GPU the host memory is pinned, and a second stream copies while the network computes: the activations of a
    block to the host during the forward of the next block, and back during the backward of the next block. So the
    device holds those of two blocks. Those of the last block stay, as its backward pass comes first.

    Args:
        device: of the network.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._newest: Callable[[], BlockActivations | None] = lambda: None

    def wrap(self, block: nn.Module) -> None:
        """Replaces the forward of a block; the names of its parameters stay."""
        forward = block.forward

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kept = BlockActivations(self, _staying(block, (args, kwargs)), self._newest)
            self._newest = weakref.ref(kept)  # the graph of the forward holds it
            with saved_tensors_hooks(kept.pack, kept.unpack):
                result = forward(*args, **kwargs)
            kept.end_forward()
            return result

        block.forward = offloaded

    def copying(self) -> AbstractContextManager[Any]:
        """The stream of the copies, on a GPU; it waits for what the device has been asked to compute so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)


@dataclass(frozen=True)
class SavedView:
    """A tensor that autograd has saved, as a view of a storage.

    Attributes:
        block: holds the storage.
        number: of the storage in the block.
    """

    block: "BlockActivations"
    number: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class BlockActivations:
    """The activations of one forward of one block. Tensors that share a storage are copied once.

    Device memory belongs to the stream that computes. It waits for the copies before it uses or frees that memory.

    Args:
        offload: of the network.
        staying: storages that are not copied, by their addresses.
        before: returns the activations of the block before, or None after the backward pass of that block.

    Attributes:
        host: copies of the storages, flat.
    """

    def __init__(
        self, offload: ActivationOffload, staying: set[int], before: Callable[[], "BlockActivations | None"]
    ) -> None:
        self.host: list[Tensor] = []
        self._offload = offload
        self._staying = staying
        self._before = before
        self._numbers: dict[int, int] = {}  # of the storages on the device, by their addresses
        self._on_device: list[Tensor] | None = []  # None between the forward of the next block and its backward
        self._copied: torch.cuda.Event | None = None  # after the last copy, to the host or back

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """Copies a tensor to the host when autograd saves it."""
        storage = tensor.untyped_storage()
        elsewhere = tensor.device != self._offload.device or storage._cdata in self._staying
        if type(tensor) is not Tensor or not tensor.is_floating_point() or elsewhere:
            return tensor
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self.host)
            self._copy_to_host(tensor.detach())
        number = self._numbers[storage._cdata]
        return SavedView(self, number, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | SavedView) -> Tensor:
        """The tensor on the device, when the backward pass asks for it. Starts to fetch those of the block before."""
        if isinstance(saved, Tensor):
            return saved
        flat = self.fetch()[saved.number]
        if (before := self._before()) is not None:
            before.fetch()
        if self._copied is not None:
            torch.cuda.current_stream(self._offload.device).wait_event(self._copied)
        return flat.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)

    def end_forward(self) -> None:
        """Frees the activations of the block before on the device."""
        if self._offload.stream is not None:
            self._copied = self._offload.stream.record_event()
        if (before := self._before()) is not None:
            before.release()

    def release(self) -> None:
        """Frees the storages on the device, once they are copied."""
        if self._copied is not None:
            torch.cuda.current_stream(self._offload.device).wait_event(self._copied)
        self._numbers, self._on_device = {}, None

    def fetch(self) -> list[Tensor]:
        """The storages on the device; starts to copy them if they are not there."""
        if self._on_device is None:
            self._on_device = [torch.empty_like(flat, device=self._offload.device) for flat in self.host]
            with self._offload.copying():
                for target, flat in zip(self._on_device, self.host, strict=True):
                    target.copy_(flat, non_blocking=True)
            if self._offload.stream is not None:
                self._copied = self._offload.stream.record_event()
        return self._on_device

    def _copy_to_host(self, tensor: Tensor) -> None:
        """Starts to copy the whole storage of a tensor."""
        assert self._on_device is not None
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        with self._offload.copying(), record_function(OFFLOADED_ACTIVATIONS):
            copy = to_host(flat, non_blocking=True)
        self._on_device.append(flat)
        self.host.append(copy)


def _staying(block: nn.Module, inputs: Any) -> set[int]:
    """The storages of a block's weights, and of inputs that do not train, such as masks: all blocks share those."""
    weights = map(to_local, (*block.parameters(), *block.buffers()))
    shared = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not leaf.requires_grad)
    return {tensor.untyped_storage()._cdata for tensor in (*weights, *shared)}
