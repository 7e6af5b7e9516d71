"""Weights of linear layers stored by columns, which a CPU multiplies faster by few rows.

For few rows, a product with weights (out, in) spends much of its time on reordering them. Stored as (in, out) they are
read as they lie: on one thread, 8 rows take about half of the time, 64 rows three quarters.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class ColumnWeights:
    """Storage (in, out) for the weights of linear layers. It is allocated when a weight is first stored.

    Args:
        groups: of layers with the same input. A group has one storage, so that one product computes all of its layers.
    """

    def __init__(self, groups: Iterable[Sequence[nn.Linear]]) -> None:
        self._groups = [tuple(group) for group in groups]
        self._places: dict[int, tuple[int, int]] = {}  # by the id of a weight: its group, and its first column
        self._storage: dict[int, Tensor] = {}  # (in, out of all layers), by the number of the group
        for number, group in enumerate(self._groups):
            start = 0
            for layer in group:
                self._places[id(layer.weight)] = number, start
                start += len(layer.weight)

    def store(self, weight: Tensor, tensor: Tensor) -> Tensor | None:
        """Stores a tensor (out, in) in the place of a weight.

        Returns:
            A view of the storage, like the weight; None for what is no weight of the layers.
        """
        if (place := self._places.get(id(weight))) is None:
            return None
        number, start = place
        if number not in self._storage:
            weights = [layer.weight for layer in self._groups[number]]
            self._storage[number] = weight.new_empty(weight.shape[1], sum(map(len, weights)))
        stored = self._storage[number][:, start : start + len(weight)]
        columns = tensor.detach().to(weight.device, weight.dtype).t()
        # torch transposes two to three times as fast into a tensor without gaps between its rows
        stored.copy_(columns if stored.is_contiguous() else columns.contiguous())
        return stored.t()

    def joined(self, layer: nn.Linear) -> Tensor:
        """The weights (in, out of all layers) of the group that begins with this layer."""
        number, start = self._places[id(layer.weight)]
        assert start == 0, "not the first layer of its group"
        return self._storage[number]

    def clear(self) -> None:
        """Frees the storage. What `store` returned keeps it."""
        self._storage.clear()


def biases(*layers: nn.Linear) -> Tensor | None:
    """The biases of layers, joined; None if they have none."""
    own: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    assert len(own) in (0, len(layers)), "layers with a bias beside layers without"
    return torch.cat(own) if own else None
