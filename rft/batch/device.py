"""Copies of tensors between the host and a GPU, by way of pinned memory."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from torch import Tensor

Item = TypeVar("Item")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, by way of pinned memory where that is a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor, pinned: bool = True, non_blocking: bool = False) -> Tensor:
    """A contiguous copy in the memory of the host.

    Args:
        pinned: a GPU writes to pinned memory, several times as fast. torch keeps its blocks, each of a power of two
            bytes, for the next copies: it is for what is released soon.
        non_blocking: of a GPU: the copy is only started. The caller waits for the stream before it reads.
    """
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned and tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=non_blocking)


def rows_to_device(rows: TensorDict, device: torch.device) -> TensorDict:
    """Rows of the host on a device, column by column as `to_device`."""
    moved = rows.apply(lambda column: to_device(column, device), device=device)
    assert moved is not None
    return moved


@cache  # one for all loops: torch's allocator keeps the free memory of each stream apart
def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of `one_ahead` on a GPU; None on another device."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def one_ahead(items: Iterator[Item], device: torch.device) -> Iterator[Item]:
    """The items of an iterator, each of them made before the caller computes with the one before it.

    On a GPU a second stream copies the next item to the device while the stream of the caller computes. Two items exist
    at most, if the caller drops an item before it asks for another one.

    Args:
        items: makes each item by copies to the device, and computes nothing there.
    """
    stream, ahead = copy_stream(device), deque[Item]()

    def make_next() -> None:
        making: AbstractContextManager[Any] = nullcontext()
        if stream is not None:  # the copy may reuse memory of earlier items, with which the caller still computes
            stream.wait_stream(torch.cuda.current_stream(device))
            making = torch.cuda.stream(stream)
        with making:
            ahead.extend(islice(items, 1))

    make_next()
    while ahead:
        if stream is not None:
            torch.cuda.current_stream(device).wait_stream(stream)
        make_next()
        yield ahead.popleft()


class HostColumns:
    """Columns of the host that parts on a device are written to. The host waits once, for all parts.

    Attributes:
        columns: by name, (B, T) or (B, T, K), zero where nothing was written. They are complete after `wait`.

    Args:
        names: of the columns.
        shape: B and T.
        device: of the parts.
    """

    def __init__(self, names: tuple[str, ...], shape: torch.Size, device: torch.device) -> None:
        self.columns = {name: torch.zeros(shape) for name in names}
        self._device = device
        self._copies: list[tuple[str, Tensor, Tensor]] = []  # on their way: name, rows, pinned memory

    def write(self, name: str, rows: Tensor, part: Tensor) -> None:
        """Writes a part (b, t) or (b, t, K) to the first columns of b rows."""
        if self._device.type != "cuda":
            self._put(name, rows, part)
            return
        self._copies.append((name, rows, to_host(part, non_blocking=True)))

    def wait(self) -> None:
        """Returns when all parts are written."""
        if self._copies:
            torch.cuda.current_stream(self._device).synchronize()
        for copy in self._copies:
            self._put(*copy)
        self._copies = []

    def _put(self, name: str, rows: Tensor, part: Tensor) -> None:
        column = self.columns[name]
        if part.dim() > column.dim():  # several numbers a token
            column = self.columns[name] = part.new_zeros(*column.shape, *part.shape[2:])
        column[rows, : part.shape[1]] = part
