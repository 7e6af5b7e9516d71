"""Weights of linear layers stored by columns, which a CPU multiplies faster by few rows.

For few rows, a product with weights (out, in) spends much of its time on reordering them. Stored as (in, out) they are
read as they lie: on one thread, 8 rows take about half of the time, 64 rows three quarters.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.profiler import record_function


class ColumnWeights:
    """The weights of linear layers in storage (in, out), while a block of `filled` runs.

    Args:
        groups: of layers with the same input. A group has one storage, so that one product computes all of its layers.
    """

    def __init__(self, groups: Iterable[Sequence[nn.Linear]]) -> None:
        self._groups = [tuple(group) for group in groups]
        self._storage: dict[nn.Linear, Tensor] = {}  # (in, out of all layers), by the first layer of the group

    @contextmanager
    def filled(self) -> Iterator[None]:
        """In the block, the layers have their weights in the storage. Behind it they have what they had."""
        before = {layer: layer.weight.data for group in self._groups for layer in group}
        try:
            for group in self._groups:
                self._storage[group[0]] = _columns(group)
            yield
        finally:
            for layer, weight in before.items():
                layer.weight.data = weight
            self._storage.clear()

    def joined(self, layer: nn.Linear) -> Tensor:
        """The weights (in, out of all layers) of the group that begins with this layer."""
        return self._storage[layer]


@torch.inference_mode(False)
@torch.no_grad()
def _columns(group: Sequence[nn.Linear]) -> Tensor:
    """The storage (in, out of all layers) of a group, in which its layers have their weights from now on."""
    sizes = [len(layer.weight) for layer in group]
    with record_function("engine"):  # mode=plan counts what is allocated under this label
        storage = group[0].weight.new_empty(group[0].in_features, sum(sizes))
        for layer, place in zip(group, storage.split(sizes, 1), strict=True):
            columns = layer.weight.data.t()
            # torch transposes two to three times as fast into a tensor without gaps between its rows
            place.copy_(columns if place.is_contiguous() else columns.contiguous())
            layer.weight.data = place.t()
    return storage


def biases(*layers: nn.Linear) -> Tensor | None:
    """The biases of layers, joined; None if they have none."""
    own: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    assert len(own) in (0, len(layers)), "layers with a bias beside layers without"
    return torch.cat(own) if own else None
