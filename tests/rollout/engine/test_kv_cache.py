"""How much room a growing cache takes, and which rows it keeps."""

import pytest
import torch

from rft.rollout.engine.kv_cache import GrowingLayer, capacity, keep_rows, make_cache
from tests.rollout.word_models import build


@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (10, 1), (10, 60), (100, 1), (100, 50), (100, 51), (100, 400)])
def test_the_capacity_of_a_layer_is_what_its_storage_has_room_for(prompt, new):
    joined = GrowingLayer()
    joined.update(torch.zeros(1, 2, prompt, 4), torch.zeros(1, 2, prompt, 4))
    layer = GrowingLayer.join([joined], [torch.tensor([3])])  # as the engine has it behind the prompts
    for _ in range(new):
        keys, _ = layer.update(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4))
    assert keys.shape[2] == prompt + new
    assert keys.untyped_storage().nbytes() == 3 * 2 * capacity(prompt, new) * 4 * 4


def test_kept_rows_stay_where_they_are():
    """Two of five rows move; the storage is the same, and the cache still grows."""
    cache = make_cache(build().config)
    states = torch.randn(5, 2, 3, 8)
    for layer in range(len(cache.layers)):
        cache.update(states + layer, -states - layer, layer)
    storage = cache.layers[0].keys.data_ptr()
    kept = torch.tensor([0, 4, 3])
    keep_rows(cache, kept)
    for number, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys, states[kept] + number) and torch.equal(layer.values, -states[kept] - number)
    assert cache.layers[0].keys.data_ptr() == storage
    keys, _ = cache.update(states[kept, :, :1], states[kept, :, :1], 0)
    assert torch.equal(keys, torch.cat([states[kept], states[kept, :, :1]], 2))


def test_a_cache_of_transformers_keeps_rows_too():
    cache = make_cache(build("sliding").config)
    states = torch.randn(4, 2, 3, 8)
    for layer in range(len(cache.layers)):
        cache.update(states, -states, layer)
    keep_rows(cache, torch.tensor([0, 3]))
    assert all(torch.equal(layer.keys, states[[0, 3]]) for layer in cache.layers)
