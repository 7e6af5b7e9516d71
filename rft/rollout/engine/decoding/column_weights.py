"""Weights of linear layers stored by columns, which a CPU multiplies faster by few rows.

For few rows, a product with weights (out, in) spends much of its time on reordering them. Stored as (in, out) they are
read as they lie: on one thread, 8 rows take about half of the time, 64 rows three quarters.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.profiler import record_function


class ColumnWeights:
    """The weights of linear layers in storage (in, out), from `fill` to `clear`.

    Args:
        groups: of layers with the same input. A group has one storage, so that one product computes all of its layers.
    """

    def __init__(self, groups: Iterable[Sequence[nn.Linear]]) -> None:
        self._groups = [tuple(group) for group in groups]
        self._storage: dict[nn.Linear, Tensor] = {}  # (in, out of all layers), by the first layer of the group

    @torch.inference_mode(False)
    @torch.no_grad()
    def fill(self) -> None:
        """Copies the weights into the storage, where the layers then have them, unless they are there."""
        if self._storage:
            return
        for group in self._groups:
            sizes = [len(layer.weight) for layer in group]
            with record_function("engine"):  # mode=plan counts what is allocated under this label
                storage = group[0].weight.new_empty(group[0].in_features, sum(sizes))
                for layer, place in zip(group, storage.split(sizes, 1), strict=True):
                    columns = layer.weight.data.t()
                    # torch transposes two to three times as fast into a tensor without gaps between its rows
                    place.copy_(columns if place.is_contiguous() else columns.contiguous())
                    layer.weight.data = place.t()
            self._storage[group[0]] = storage

    def joined(self, layer: nn.Linear) -> Tensor:
        """The weights (in, out of all layers) of the group that begins with this layer."""
        return self._storage[layer]

    def clear(self) -> None:
        """Lets go of the storage, when the layers have other weights or none."""
        self._storage.clear()


def biases(*layers: nn.Linear) -> Tensor | None:
    """The biases of layers, joined; None if they have none."""
    own: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    assert len(own) in (0, len(layers)), "layers with a bias beside layers without"
    return torch.cat(own) if own else None
