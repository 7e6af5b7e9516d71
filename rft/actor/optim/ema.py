"""The exponential moving average (EMA) of the weights over the updates of a stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from rft.strategy.base import Strategy


class WeightAverage:
    """The exponential moving average of the trainable weights of a network: float32, sharded like the weights.

    After update n the average is the sum of (1 - decay) decay^(n - i) w_i over the updates i = 1..n, divided by 1 -
    decay^n, the sum of these factors. The weights before the first update do not count. Adam corrects the bias of its
    moments in the same way (Kingma and Ba, arXiv 1412.6980, section 3).

    Args:
        network: already sharded by the strategy.
        decay: the factor of the old average in an update, in the limit of many updates.
    """

    def __init__(self, network: nn.Module, strategy: Strategy, decay: float) -> None:
        self.updates = 0
        self._network = network
        self._strategy = strategy
        self._decay = decay
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []  # average and weight; empty before the first update

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average."""
        if not self.updates:
            self._begin()
        self.updates += 1
        share = (1 - self._decay) / (1 - self._decay**self.updates)
        for average, weight in self._pairs:
            average.lerp_(weight, share)

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """Inside the block the network has the averaged weights; before the first update, its own."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """The full average on the CPU of rank zero. A collective."""
        with self.in_network():
            weights = self._strategy.model_state(self._network, with_frozen=False) if self.updates else {}
        return {"updates": self.updates, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, on any number of ranks. A collective."""
        self.updates = state["updates"]
        if self.updates:
            self._begin()
            with self.in_network():
                self._strategy.load_model_state(self._network, state["weights"])

    def _begin(self) -> None:
        trained = [parameter for parameter in self._network.parameters() if parameter.requires_grad]
        with record_function("ema"):  # mode=plan counts what is allocated under this label
            self._pairs = [(torch.zeros_like(weight), weight) for weight in trained]

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in self._pairs:
            current = weight.clone()
            weight.copy_(average)
            average.copy_(current)
