import weakref

import pytest
import torch
from torch import nn

from rft.rollout.engine.decoding.column_weights import ColumnWeights, biases


def test_a_group_lies_in_one_storage_until_the_block_ends():
    torch.manual_seed(0)
    first, second, alone = layers = (nn.Linear(3, 4), nn.Linear(3, 2), nn.Linear(4, 5))
    places = [layer.weight.data_ptr() for layer in layers]
    given = [layer.weight.detach().clone() for layer in layers]
    states = torch.randn(2, 3)
    outputs = torch.cat([first(states), second(states)], 1)
    weights = ColumnWeights([(first, second), (alone,)])
    with torch.inference_mode(), weights.filled():
        for layer, weight in zip(layers, given, strict=True):
            assert torch.equal(layer.weight, weight) and layer.weight.stride(0) == 1
            assert not layer.weight.is_inference()
        joined = weights.joined(first)
        assert joined.is_contiguous() and torch.equal(joined, torch.cat(given[:2]).t())
        assert first.weight.data_ptr() == joined.data_ptr()
        assert torch.equal(weights.joined(alone), given[2].t())
        torch.testing.assert_close(torch.cat([first(states), second(states)], 1), outputs)
        torch.testing.assert_close(states @ joined + biases(first, second), outputs)
    storage = weakref.ref(joined)
    del joined
    assert storage() is None
    assert [layer.weight.data_ptr() for layer in layers] == places


def test_an_error_in_the_block_leaves_the_layers_as_they_were():
    layer = nn.Linear(3, 4)
    place, weights = layer.weight.data_ptr(), ColumnWeights([(layer,)])
    with pytest.raises(KeyError), weights.filled():
        raise KeyError
    assert layer.weight.data_ptr() == place
    layer.weight.data = torch.ones(4, 3)
    with weights.filled():
        assert torch.equal(weights.joined(layer), torch.ones(3, 4))


def test_biases_of_layers():
    with_bias, without = nn.Linear(2, 3), nn.Linear(2, 3, bias=False)
    assert biases(without, without) is None
    assert torch.equal(biases(with_bias, with_bias), with_bias.bias.repeat(2))
    with pytest.raises(AssertionError, match="beside layers without"):
        biases(with_bias, without)
