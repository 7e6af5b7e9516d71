"""Gloo in place of NCCL, for both ends of vLLM's own weight transfer on a CPU.

A vLLM server with this folder in PYTHONPATH loads it as a plugin, so it imports no other module of the tests.
"""

from contextlib import nullcontext
from datetime import timedelta
from socket import create_server

import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore

ID_BYTES = 128  # of an id of NCCL
HOST = "127.0.0.1"


def gloo(identity, rank, size, timeout):
    """The group of those who have an id, which is the port of their store."""
    store = TCPStore(HOST, int(identity.rstrip(b"\0")), is_master=False, timeout=timeout)
    how = ProcessGroupGloo._Options()
    how._devices, how._timeout = [ProcessGroupGloo.create_device(hostname=HOST)], timeout
    return ProcessGroupGloo(store, rank, size, how)


class TorchNCCL:
    """torch's `ProcessGroupNCCL` as rank 0 uses it: its first collective writes an id and waits for the others."""

    class Options:
        _timeout = None

    def __init__(self, store, rank, size, options):
        assert rank == 0
        self._store, self._size, self._timeout = store, size, options._timeout
        self._members = self._group = None

    def _joined(self):
        if self._group is None:
            socket = create_server((HOST, 0))  # TCPStore itself listens on all interfaces
            port, how = socket.getsockname()[1], {"wait_for_workers": False, "timeout": self._timeout}
            self._members = TCPStore(HOST, port, is_master=True, master_listen_fd=socket.detach(), **how)
            identity = str(port).encode().ljust(ID_BYTES, b"\0")
            self._store.set("0", identity)
            self._group = gloo(identity, 0, self._size, self._timeout)
        return self._group

    def allreduce(self, tensors):
        return self._joined().allreduce(tensors)

    def broadcast(self, tensors, options):
        return self._joined().broadcast(tensors, options)

    def abort(self):
        self._group.abort()


class VLLMNCCL:
    """vLLM's `PyNcclCommunicator` as its workers use it: the first collective is a sum of one element."""

    def __init__(self, identity, rank, world_size, device, library_path=None, timeout=timedelta(seconds=5)):
        assert len(identity) == ID_BYTES and 0 < rank < world_size
        self.group = gloo(identity, rank, world_size, timeout)
        self.group.allreduce([torch.zeros(1)]).wait(timeout)

    def broadcast(self, tensor, src, stream=None):
        assert src == 0
        self.group.broadcast([tensor], BroadcastOptions()).wait()

    def destroy(self):
        self.group = None


class Stream:
    """A stream of a GPU that has nothing to do."""

    def synchronize(self):
        pass


def register():
    """Replaces in vLLM what its weight transfer needs of a GPU: the communicator, streams and the device."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.weight_transfer import packed_tensor

    PyNcclCommunicator.from_unique_id_bytes = VLLMNCCL
    packed_tensor._get_streams = lambda device, count: [Stream()] * count
    torch.cuda.stream = nullcontext
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda: None
