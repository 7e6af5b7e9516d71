"""The exponential moving average (EMA) of the weights over the updates of a stage."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function


@contextmanager
def swapped(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside the block the two tensors of each pair have the values of each other."""
    _swap(pairs)
    try:
        yield
    finally:
        _swap(pairs)


@torch.no_grad()
def _swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        before = one.clone()
        one.copy_(other)
        other.copy_(before)


class WeightAverage:
    """The exponential moving average of the trainable weights of a network: float32, sharded like the weights.

    After update n the average is the sum of (1 - decay) decay^(n - i) w_i over the updates i = 1..n, divided by 1 -
    decay^n, the sum of these factors. The weights before the first update do not count. Adam corrects the bias of its
    moments in the same way (Kingma and Ba, arXiv 1412.6980, section 3).

    Args:
        network: already sharded by the strategy.
        decay: the factor of the old average in an update, in the limit of many updates.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.updates = 0
        self._network = network
        self._decay = decay
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        with record_function("ema"):  # mode=plan counts what is allocated under this label
            self._pairs = [(torch.zeros_like(weight), weight) for weight in trained]  # average and weight

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average."""
        self.updates += 1
        share = (1 - self._decay) / (1 - self._decay**self.updates)
        for average, weight in self._pairs:
            average.lerp_(weight, share)

    def in_network(self) -> AbstractContextManager[None]:
        """Inside the block the network has the averaged weights; before the first update, its own."""
        return swapped(self._pairs if self.updates else [])

    def state_dict(self) -> dict[str, Any]:
        """The average by the names of the weights, sharded as they are and not copied."""
        names = (name for name, weight in self._network.named_parameters() if weight.requires_grad)
        averages = [average for average, _ in self._pairs]
        return {"updates": self.updates, "weights": dict(zip(names, averages, strict=True))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` returned; its tensors may be those of this average, filled in place."""
        self.updates = state["updates"]
        for (average, _), tensor in zip(self._pairs, state["weights"].values(), strict=True):
            average.copy_(tensor)
