"""An average of the weights over the updates of a stage, beside the weights that train."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from rft.strategy.base import Strategy


class WeightAverage:
    """The exponential moving average of what trains in a network: float32, sharded like the weights.

    After update n the average is the sum of (1 - decay) decay^(n - i) w_i over the updates i so far, divided by the sum
    of those factors, 1 - decay^n: the weights before the first update are not part of it. (Kingma and Ba, 1412.6980,
    section 3, correct the moments of Adam in the same way.)

    Args:
        network: already sharded by the strategy.
        decay: the share of the average that an update keeps, in the long run.
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
        """The network holds the average in the block; no change before the first update."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """The whole average on the CPU of rank zero. A collective."""
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
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)
