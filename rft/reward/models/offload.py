"""The device memory of reward models: a model stays on the device of the run, is there only while it computes, or is
spread over the ranks: each holds its shards, and blocks are gathered to compute.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from rft.actor.init import blocks, load_model
from rft.actor.loading.deferred_init import Drawing
from rft.actor.model import empty_like, read_shards
from rft.distributed import World
from rft.reward.term import Offload, leaving_collective
from rft.strategy.base import Strategy

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


class ShardedModel(HeldModel):
    """A model whose weights are spread over the ranks, from its first use on. Every use is a collective.

    Args:
        load: makes the sharded model, in evaluation mode.
        world: all processes.
        strategy: of the model.
        key: of the term in the yaml, which messages about a rank that hangs name.
    """

    def __init__(self, load: Callable[[], PreTrainedModel], world: World, strategy: Strategy, key: str) -> None:
        self._load = load
        self._world = world
        self._strategy = strategy
        self._key = key
        self._kept: PreTrainedModel | None = None

    def forwards(self, own: int) -> int:
        """As many as the rank with most of them."""
        return int(max(self._world.gather(own)))

    def forward_pass(self) -> AbstractContextManager[None]:
        """The block is one forward, which needs all ranks."""
        return self._world.wait.during(f"a forward pass of {self._key}")

    @contextmanager
    def loaded(self) -> Iterator[PreTrainedModel]:
        """The block computes with the shards of this rank.

        Raises:
            CollectiveError: an error is raised in the block, while other ranks compute with this one.
        """
        with leaving_collective():
            if self._kept is None:
                with self._world.wait.during(f"the loading of {self._key}"):
                    self._kept = self._load()
            yield self._kept
            self._strategy.reshard(self._kept)


def load_sharded(path: str, config: PretrainedConfig, kind: Any, strategy: Strategy) -> PreTrainedModel:
    """A model in evaluation mode; this rank reads its own shards of the files alone, where the strategy allows it.

    Args:
        path: a folder or hub name.
        kind: the auto class of transformers.
        strategy: spreads the model; its dtype is that of the weights.
    """
    drawing = Drawing() if strategy.shards_meta else None
    model = load_model(path, config, 0, kind, drawing=drawing)
    plain = empty_like(model, strategy.world.device)
    for parameter in model.parameters():  # torch chooses kernels by requires_grad, so it stays that of a whole model
        parameter.data = parameter.data.to(strategy.dtype)
    strategy.shard(model, blocks(model))
    read_shards(strategy, model, model, plain, path, drawing)
    return model.eval()
