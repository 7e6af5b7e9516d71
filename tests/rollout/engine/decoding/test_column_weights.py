import pytest
import torch
from torch import nn

from rft.rollout.engine.decoding.column_weights import ColumnWeights, biases


def test_a_group_lies_in_one_storage():
    torch.manual_seed(0)
    first, second, alone = nn.Linear(3, 4), nn.Linear(3, 2), nn.Linear(4, 5)
    given = [layer.weight.detach().clone() for layer in (first, second, alone)]
    weights = ColumnWeights([(first, second), (alone,)])
    for layer, weight in zip((first, second, alone), given, strict=True):
        layer.weight.data = weights.store(layer.weight, weight.double())
        assert torch.equal(layer.weight, weight) and layer.weight.stride(0) == 1 and layer.weight.dtype == weight.dtype
    joined = weights.joined(first)
    assert joined.is_contiguous() and torch.equal(joined, torch.cat(given[:2]).t())
    assert torch.equal(weights.joined(alone), given[2].t())
    states = torch.randn(2, 3)
    outputs = torch.cat([first(states), second(states)], 1)
    torch.testing.assert_close(states @ joined + biases(first, second), outputs)
    with pytest.raises(AssertionError, match="not the first layer"):
        weights.joined(second)


def test_other_weights_have_no_place_and_none_is_left_after_a_clear():
    layer = nn.Linear(3, 4)
    weights = ColumnWeights([(layer,)])
    assert weights.store(layer.bias, layer.bias) is None
    assert weights.store(nn.Linear(3, 4).weight, layer.weight) is None
    first = weights.store(layer.weight, layer.weight)
    assert weights.store(layer.weight, layer.weight).data_ptr() == first.data_ptr()
    weights.clear()
    assert weights.store(layer.weight, layer.weight).data_ptr() != first.data_ptr()


def test_biases_of_layers():
    with_bias, without = nn.Linear(2, 3), nn.Linear(2, 3, bias=False)
    assert biases(without, without) is None
    assert torch.equal(biases(with_bias, with_bias), with_bias.bias.repeat(2))
    with pytest.raises(AssertionError, match="beside layers without"):
        biases(with_bias, without)
