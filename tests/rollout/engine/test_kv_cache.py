"""How much room a growing cache takes."""

import pytest
import torch

from rft.rollout.engine.kv_cache import GrowingLayer, capacity


@pytest.mark.parametrize(("prompt", "new"), [(1, 1), (10, 1), (10, 60), (100, 1), (100, 50), (100, 51), (100, 400)])
def test_the_capacity_of_a_layer_is_what_its_storage_has_room_for(prompt, new):
    joined = GrowingLayer()
    joined.update(torch.zeros(1, 2, prompt, 4), torch.zeros(1, 2, prompt, 4))
    layer = GrowingLayer.join([joined], [torch.tensor([3])])  # as the engine has it behind the prompts
    for _ in range(new):
        keys, _ = layer.update(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4))
    assert keys.shape[2] == prompt + new
    assert keys.untyped_storage().nbytes() == 3 * 2 * capacity(prompt, new) * 4 * 4
