"""Token weights: numbers by hand, degenerate batches, and the same result on any number of ranks."""

import pytest
import torch

from rft.algorithm import AGGREGATIONS
from rft.algorithm.token_weights.aggregation import group_mean, unit_weights

KEEP = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
GROUP = torch.tensor([5, 5, 2, 2, 9])
OPTIONS = {"seq_mean_token_sum_norm": {"constant": 8.0}}
BY_ROW = {  # weight of a trained token in rows of 1, 3, 0, 2 and 0 of them; groups of 4, 2 and 0
    "token_mean": [1 / 6, 1 / 6, 0, 1 / 6, 0],
    "seq_mean_token_mean": [1 / 3, 1 / 9, 0, 1 / 6, 0],
    "seq_mean_token_sum": [1 / 3, 1 / 3, 0, 1 / 3, 0],
    "seq_mean_token_sum_norm": [1 / 24, 1 / 24, 0, 1 / 24, 0],
    "group_mean": [1 / 8, 1 / 8, 0, 1 / 4, 0],
    "token_sum": [1, 1, 0, 1, 0],
}


def alone(tensor):
    return tensor


def build(name):
    return AGGREGATIONS.build({"name": name, **OPTIONS.get(name, {})}, "aggregation")


def test_every_aggregation_is_worked_by_hand():
    assert sorted(BY_ROW) == AGGREGATIONS.names()


@pytest.mark.parametrize("name", sorted(BY_ROW))
def test_by_hand(name):
    found = build(name)(KEEP, GROUP, all_sum=alone)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor(BY_ROW[name], dtype=torch.float32)[:, None] * KEEP)


@pytest.mark.parametrize("name", sorted(BY_ROW))
def test_padding_and_row_order_do_not_matter(name):
    order = torch.tensor([3, 0, 4, 2, 1])
    wide = torch.nn.functional.pad(KEEP, (0, 3))
    expected = build(name)(KEEP, GROUP, all_sum=alone)
    found = build(name)(wide[order], GROUP[order], all_sum=alone)
    assert torch.equal(found[:, :4], expected[order])
    assert not found[:, 4:].any()


@pytest.mark.parametrize("name", sorted(BY_ROW))
def test_nothing_trained_weighs_nothing(name):
    assert not build(name)(torch.zeros_like(KEEP), GROUP, all_sum=alone).any()


def test_unit_weights_by_hand():
    torch.testing.assert_close(unit_weights(KEEP, all_sum=alone), torch.tensor([1 / 3, 1 / 3, 0, 1 / 3, 0]))
    assert not unit_weights(torch.zeros_like(KEEP), all_sum=alone).any()


def test_groups_of_other_ranks_may_bear_the_same_number():
    """A rank sees its own groups only; two ranks with one group each make two groups."""
    found = group_mean(KEEP[:2], GROUP[:2], all_sum=lambda groups: groups + 1)
    torch.testing.assert_close(found, KEEP[:2] / 8)
