"""A key-value cache that grows by doubling: transformers' own copies all of it at every token."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """The keys and values (R, heads, T, width) of one full-attention layer, as views of storage with room to spare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Appends (R, heads, t, width) and returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            self._room = (key_states, value_states)
            return key_states, value_states
        past = self.keys.shape[2]
        total = past + key_states.shape[2]
        if total > self._room[0].shape[2]:
            self._room = (_copy(self.keys, 2 * total), _copy(self.values, 2 * total))
        keys, values = self._room
        keys[:, :, past:total] = key_states
        values[:, :, past:total] = value_states
        self.keys, self.values = keys[:, :, :total], values[:, :, :total]
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keeps these rows, in this order; a row may come several times."""
        total = self.keys.shape[2]
        self._room = (self._room[0].index_select(0, beam_idx), self._room[1].index_select(0, beam_idx))
        self.keys, self.values = self._room[0][:, :, :total], self._room[1][:, :, :total]


def _copy(states: Tensor, capacity: int) -> Tensor:
    """Storage (R, heads, capacity, width) that begins with the given states."""
    rows, heads, total, width = states.shape
    room = states.new_empty(rows, heads, capacity, width)
    room[:, :, :total] = states
    return room


def make(config: PreTrainedConfig) -> Cache:
    """An empty cache: growing where every layer is of full attention, else the model's own."""
    own = DynamicCache(config=config)
    if all(type(layer) is DynamicLayer for layer in own.layers):
        return Cache(layers=[GrowingLayer() for _ in own.layers])
    return own
