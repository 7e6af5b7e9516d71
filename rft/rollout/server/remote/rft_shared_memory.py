"""Memory of rank 0 that other processes of its machine map: CUDA IPC on a GPU, a shared file without a name on a CPU.

The file (memfd_create, Linux) is in no folder: the kernel frees it with the last process that has it, also after a
crash, and the size of /dev/shm does not limit it. Handles are JSON. It needs torch alone; see `rft_receiver`.
"""

import base64
import mmap
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Handle = dict[str, Any]
NAME = "rft_weights"
CURE = "set rollout.engine.servers.transport=group"


class SharedMemory:
    """Memory of this process that others can map.

    Args:
        size: bytes.
        device: a GPU or the CPU.

    Attributes:
        data: the memory, (size,) uint8 on the device.

    Raises:
        RuntimeError, OSError: there is not enough memory.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._file: int | None = None
        if device.type == "cuda":
            self.data = torch.empty(size, dtype=torch.uint8, device=device)
        else:
            self._file = os.memfd_create(NAME)
            os.ftruncate(self._file, size)
            self.data = _map(self._file)

    def handle(self) -> Handle:
        """A handle that one process may open once: torch counts the openings of memory of a GPU."""
        if self._file is not None:
            return {"process": os.getpid(), "file": self._file, "inode": os.fstat(self._file).st_ino}
        _, *fields = self.data.untyped_storage()._share_cuda_()
        encoded = [base64.b64encode(field).decode() if isinstance(field, bytes) else field for field in fields]
        return {"device": uuid_of(self.data.device), "fields": encoded}

    def close(self) -> None:
        """Ends that others can map it. It is freed once this object, `data` and what others have mapped are gone."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def attach(handle: Handle) -> Tensor:
    """Maps memory of another process, (size,) uint8; until the tensor is released.

    Raises:
        RuntimeError: this process cannot map it; names the cause and the cure.
    """
    return _attach_gpu(handle) if "device" in handle else _attach_file(handle)


def _attach_file(handle: Handle) -> Tensor:
    path = Path(f"/proc/{handle['process']}/fd/{handle['file']}")
    try:
        if NAME not in os.readlink(path) or path.stat().st_ino != handle["inode"]:
            raise FileNotFoundError(f"{path} is another file")  # of another process with this number
        with path.open("r+b") as file:
            return _map(file.fileno())
    except OSError as error:
        raise RuntimeError(
            f"this process cannot map the memory of rank 0 ({error}); both must run on one machine, as one user and in "
            f"one container; or {CURE}"
        ) from error


def _attach_gpu(handle: Handle) -> Tensor:
    visible = {uuid_of(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    if handle["device"] not in visible:
        raise RuntimeError(
            f"this process does not see the GPU of rank 0, {handle['device']}, only {', '.join(visible)}; add it "
            f"to the server's CUDA_VISIBLE_DEVICES, or {CURE}"
        )
    index = visible[handle["device"]]
    fields = [base64.b64decode(field) if isinstance(field, str) else field for field in handle["fields"]]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(index, *fields)
    except RuntimeError as error:
        raise RuntimeError(f"this process cannot map the memory of rank 0's GPU ({error}); {CURE}") from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def uuid_of(device: torch.device) -> str:
    """The identity of a GPU, which is the same in all processes; an index depends on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _map(file: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
