"""Copies of tensors between the host and a GPU for which the host does not wait."""

import torch
from tensordict import TensorDict
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, by way of pinned memory where that is a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def rows_to_device(rows: TensorDict, device: torch.device) -> TensorDict:
    """Rows of the host on a device, column by column as `to_device`."""
    moved = rows.apply(lambda column: to_device(column, device), device=device)
    assert moved is not None
    return moved


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
        copy = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
        self._copies.append((name, rows, copy))

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
