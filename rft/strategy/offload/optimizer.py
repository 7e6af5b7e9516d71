"""The state of an optimizer in host memory between its steps."""

from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from rft.strategy.base import OFFLOADED_OPTIMIZER
from rft.strategy.gather import to_local


class OptimizerOffload:
    """Keeps the state of an optimizer in host memory; the device holds it only during a step.

    Host memory, pinned for a GPU, is allocated once. Scalars, such as the number of steps, are not moved.

    Args:
        optimizer: without state. Its hooks hold this object.
        device: of its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._device = device
        self._host: dict[tuple[Tensor, str], Tensor] = {}  # by parameter and name
        optimizer.register_step_pre_hook(self._load)
        optimizer.register_step_post_hook(self._offload)
        optimizer.register_load_state_dict_post_hook(self._offload)

    @torch.no_grad()
    def _load(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, name in self._host:
            host = optimizer.state[parameter][name]
            on_device = torch.empty_like(host, device=self._device)
            optimizer.state[parameter][name] = on_device.copy_(host, non_blocking=True)

    @torch.no_grad()
    def _offload(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter, state in optimizer.state.items():
            for name, tensor in state.items():
                if isinstance(tensor, Tensor) and tensor.dim() > 0:
                    state[name] = self._host_memory(parameter, name, tensor).copy_(tensor, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the CPU may read the copies from now on
            torch.cuda.empty_cache()  # an engine with memory of its own cannot use the cache of this process

    def _host_memory(self, parameter: Tensor, name: str, tensor: Tensor) -> Tensor:
        if (parameter, name) not in self._host:
            with record_function(OFFLOADED_OPTIMIZER):
                host = torch.empty_like(tensor, device="cpu")
                if self._device.type == "cuda":
                    local = to_local(host)
                    local.data = local.pin_memory()
            self._host[parameter, name] = host
        return self._host[parameter, name]
