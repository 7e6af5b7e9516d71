"""An average of the weights over the updates of a stage, beside the weights that train."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rft.strategy.fsdp2 import FSDP2


class WeightAverage:
    """The exponential moving average of what trains in a network: float32, sharded like the weights.

    After update n the average is the sum of (1 - decay) decay^(n - i) w_i over the updates i so far, divided by the sum
    of those factors, 1 - decay^n: the weights before the first update have no part in it. (Kingma and Ba, 1412.6980,
    section 3, do so with the moments of Adam.)

    Args:
        network: already sharded, by this strategy.
        decay: the part of the average that stays in an update, in the long run.
    """

    def __init__(self, network: nn.Module, strategy: FSDP2, decay: float) -> None:
        self.updates = 0
        self._network = network
        self._strategy = strategy
        self._decay = decay
        self._pairs: list[tuple[Tensor, nn.Parameter]] = []  # an average and its weights; none before the first update

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights as they are now."""
        if not self.updates:
            self._begin()
        self.updates += 1
        share = (1 - self._decay) / (1 - self._decay**self.updates)
        for average, weight in self._pairs:
            average.lerp_(weight, share)

    @contextmanager
    def in_network(self) -> Iterator[None]:
        """The network holds the average for a while, and its own weights again after; nothing where no update was."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def state_dict(self) -> dict[str, Any]:
        """The average, whole, on the CPU of rank zero. A collective."""
        with self.in_network():
            weights = self._strategy.model_state(self._network, with_frozen=False) if self.updates else {}
        return {"updates": self.updates, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` wrote, on any number of ranks. A collective."""
        self.updates = state["updates"]
        if self.updates:
            self._begin()
            with self.in_network():
                self._strategy.load_model_state(self._network, state["weights"])

    def _begin(self) -> None:
        trained = [parameter for parameter in self._network.parameters() if parameter.requires_grad]
        self._pairs = [(torch.zeros_like(weight), weight) for weight in trained]

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in self._pairs:
            held = weight.clone()
            weight.copy_(average)
            average.copy_(held)
