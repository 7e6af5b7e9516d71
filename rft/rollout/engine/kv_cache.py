"""A key-value cache that over-allocates: that of transformers copies all keys and values at every token."""

from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

LABEL = "kv cache"  # mode=plan counts what is allocated under this label


class GrowingLayer(DynamicLayer):
    """Keys and values (R, heads, T, width) of a full-attention layer: views of a storage for more tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Appends the states (R, heads, t, width) of new tokens and returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._store(key_states, value_states, key_states.shape[2])
            return self.keys, self.values
        past = self.keys.shape[2]
        total = past + key_states.shape[2]
        if total > self._storage[0].shape[2]:
            with record_function(LABEL):
                self._store(grown(self.keys, total), grown(self.values, total), past)
        for storage, states in zip(self._storage, (key_states, value_states), strict=True):
            storage[:, :, past:total] = states
        self._store(*self._storage, total)
        return self.keys, self.values

    def keep(self, count: int, moved: Tensor, sources: Tensor) -> None:
        """Keeps the first `count` rows, after those at `moved` (n,) are replaced by those at `sources` (n,)."""
        total = self.keys.shape[2]
        with record_function(LABEL):
            for states in (self.keys, self.values):
                states[moved] = states[sources]
        keys, values = self._storage
        self._store(keys[:count], values[:count], total)

    def _store(self, keys: Tensor, values: Tensor, total: int) -> None:
        self._storage = (keys, values)
        self.keys, self.values = keys[:, :, :total], values[:, :, :total]

    @staticmethod
    def join(parts: list["GrowingLayer"], copies: list[Tensor]) -> "GrowingLayer":
        """Concatenates the rows of several layers, each row repeated; shorter rows are padded on the left with zeros.

        Args:
            parts: layers of R_i rows.
            copies: for each part, (R_i,) how often a row is repeated.
        """
        longest = max(part.keys.shape[2] for part in parts)
        joined = GrowingLayer()
        joined.lazy_initialization(parts[0].keys, parts[0].values)
        with record_function(LABEL):
            joined._store(
                _gather([part.keys for part in parts], copies, longest),
                _gather([part.values for part in parts], copies, longest),
                longest,
            )
        return joined


class LabelledCache(DynamicCache):
    """The model's own cache, whose allocations are labelled for mode=plan."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        with record_function(LABEL):
            return super().update(*args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        with record_function(LABEL):
            super().reorder_cache(beam_idx)


def _allocated(total: int) -> int:
    """Tokens to allocate for `total` tokens: growth by one half makes the total cost of copies linear.

    A multiple of 8, since the fast kernels of attention need that of a mask.
    """
    return -(-(total + max(total // 2, 32)) // 8) * 8


def capacity(prompt: int, new: int) -> int:
    """Tokens that a growing layer has allocated for a prompt and `new` sampled tokens."""
    allocated = _allocated(prompt)
    while allocated < prompt + new:
        allocated = _allocated(allocated + 1)
    return allocated


def _empty_storage(like: Tensor, rows: int, total: int) -> Tensor:
    """Storage (rows, heads, T, width) with T > total: zeros, since masked values must be finite."""
    return like.new_zeros(rows, like.shape[1], _allocated(total), like.shape[3])


def grown(states: Tensor, total: int) -> Tensor:
    """Keys or values in a storage for more than `total` tokens."""
    storage = _empty_storage(states, states.shape[0], total)
    storage[:, :, : states.shape[2]] = states
    return storage


def _gather(parts: list[Tensor], copies: list[Tensor], longest: int) -> Tensor:
    storage = _empty_storage(parts[0], sum(int(count.sum()) for count in copies), longest)
    start = 0
    for states, count in zip(parts, copies, strict=True):
        repeated = states.repeat_interleave(count, dim=0)
        rows, padding = slice(start, start + len(repeated)), longest - states.shape[2]
        storage[rows, :, padding:longest] = repeated
        start = rows.stop
    return storage


def make_cache(config: PreTrainedConfig) -> Cache:
    """An empty cache: a growing one if all layers use full attention, else (sliding, linear, ...) the model's own."""
    if not can_join(config):
        return LabelledCache(config=config)
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() for _ in cache.layers]
    return cache


def can_join(config: PreTrainedConfig) -> bool:
    """Whether `expand` can join several caches of this model."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def keep_rows(cache: Cache, rows: Tensor) -> None:
    """Keeps these rows (R',) alone. A growing cache copies only those that do not keep their places.

    Args:
        rows: a row that does not keep its place comes from behind the first R'.
    """
    moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            layer.keep(len(rows), moved, rows[moved])
        else:
            with record_function(LABEL):
                layer.reorder_cache(rows)


def expand(parts: list[Cache], copies: list[Tensor]) -> Cache:
    """Joins caches, and repeats each prompt for its samples.

    Args:
        parts: caches of P_i prompts; several only if `can_join`.
        copies: for each part, (P_i,) the number of samples of a prompt.
    """
    cache = parts[0]
    if isinstance(cache.layers[0], GrowingLayer):
        cache.layers = [
            GrowingLayer.join(list(layers), copies) for layers in zip(*(p.layers for p in parts), strict=True)
        ]
    else:
        assert len(parts) == 1, "a cache with sliding or linear layers cannot be joined"
        rows = torch.arange(len(copies[0]), device=copies[0].device)
        cache.reorder_cache(rows.repeat_interleave(copies[0]))
    return cache
