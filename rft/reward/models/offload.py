"""The device memory of reward models: a model stays on the device of the run, or is there only while it computes."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from threading import Lock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rft.reward.term import Offload

ONE_AT_A_TIME = Lock()  # of this process: the peak on the device is the largest model, not the sum of all


class HeldModel(ABC):
    """Holds a model between its uses."""

    def forwards(self, own: int) -> int:
        """The number of forwards that this rank computes in the next use; those beyond `own` have no rows.

        Args:
            own: forwards of the rows of this rank.
        """
        return own

    def forward_pass(self) -> AbstractContextManager[None]:
        """The block is one forward of the model."""
        return nullcontext()

    @abstractmethod
    def loaded(self) -> AbstractContextManager[PreTrainedModel]:
        """The block computes with the model, on the device of the run."""


class DeviceModel(HeldModel):
    """A model on the device of the run: from its first use on, or with `offload` only within `loaded`.

    Args:
        load: reads the model into host memory, in evaluation mode.
    """

    def __init__(self, load: Callable[[], PreTrainedModel]) -> None:
        self._load = load
        self._device = torch.device("cpu")
        self._offload: Offload = None
        self._kept: PreTrainedModel | None = None  # on the device, or with offload=cpu in host memory

    def place(self, device: torch.device, offload: Offload) -> None:
        """Sets the device, and where the weights are outside of `loaded`; called before `loaded`."""
        self._device = device
        self._offload = offload

    @contextmanager
    def loaded(self) -> Iterator[PreTrainedModel]:
        """The model on the device. With `offload` the next model of this process is loaded when the block has ended.

        The weights then leave the device, also if the block raises an error.
        """
        if self._offload is None:
            if self._kept is None:
                self._kept = self._load().to(self._device)
            yield self._kept
            return
        with ONE_AT_A_TIME:
            model = self._load() if self._offload == "disk" else self._from_host()
            try:
                yield model.to(self._device, non_blocking=True)
            finally:
                free(model)

    def _from_host(self) -> PreTrainedModel:
        """A model that shares the parameters in host memory; they stay there when it is moved."""
        if self._kept is None:
            self._kept = self._load()
            if self._device.type == "cuda":
                for tensor in tensors(self._kept):
                    tensor.data = tensor.data.pin_memory()
        shared: dict[int, Tensor] = {}  # by the original's id, so that tied weights stay tied
        for parameter in self._kept.parameters():
            # torch chooses kernels by requires_grad, so that another value would round differently
            shared[id(parameter)] = nn.Parameter(parameter.data, parameter.requires_grad)
        return copy.deepcopy(self._kept, shared)


def tensors(model: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of a model, tied ones once."""
    return chain(model.parameters(), model.buffers())


def free(model: nn.Module) -> None:
    """Frees the weights of a model, although the traceback of an error may still refer to them."""
    on_cuda = False
    for tensor in tensors(model):
        on_cuda |= tensor.is_cuda
        tensor.data = tensor.new_empty(0)
    if on_cuda:
        torch.cuda.empty_cache()  # an engine in another process cannot use the cache of this one
