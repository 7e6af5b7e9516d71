"""Token weights: numbers by hand, degenerate batches, and the same result on any number of ranks."""

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import AGGREGATIONS
from rft.algorithm.token_weights.aggregation import counted, group_mean, tokens_of_rows, unit_weights

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
    plugin = AGGREGATIONS.build({"name": name, **OPTIONS.get(name, {})}, "aggregation")

    def weights(keep, group, rows=None, all_sum=alone):
        return plugin(keep, group, rows=keep.any(1) if rows is None else rows, all_sum=all_sum)

    return weights


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
    torch.testing.assert_close(unit_weights(KEEP.any(1), all_sum=alone), torch.tensor([1 / 3, 1 / 3, 0, 1 / 3, 0]))
    assert not unit_weights(torch.zeros(5, dtype=torch.bool), all_sum=alone).any()


WEIGHTED = {  # tokens of the rows weigh [2], [1/2, 1, 1/2] and [1, 0], the rows 1, 3 and 1/2, so 2, 6 and 1/2 together
    "token_mean": [[2 / 8.5], [1.5 / 8.5, 3 / 8.5, 1.5 / 8.5], [0.5 / 8.5, 0]],
    "seq_mean_token_mean": [[1 / 4.5], [3 / 18, 3 / 9, 3 / 18], [0.5 / 4.5, 0]],
    "seq_mean_token_sum": [[2 / 4.5], [1.5 / 4.5, 3 / 4.5, 1.5 / 4.5], [0.5 / 4.5, 0]],
    "seq_mean_token_sum_norm": [[2 / 36], [1.5 / 36, 3 / 36, 1.5 / 36], [0.5 / 36, 0]],
    "group_mean": [[2 / 16], [1.5 / 16, 3 / 16, 1.5 / 16], [0.5 / 1, 0]],
    "token_sum": [[2], [1.5, 3, 1.5], [0.5, 0]],
}


@pytest.mark.parametrize("name", sorted(BY_ROW))
def test_weights_of_tokens_and_rows_by_hand(name):
    batch = TensorDict(
        loss_mask=KEEP,
        token_weights=torch.tensor([[9, 2, 9, 9], [9, 0.5, 1, 0.5], [9, 9, 9, 9], [9, 1, 9, 0], [9, 9, 9, 9]]),
        row_weights=torch.tensor([1, 3, 7, 0.5, 7]),
        batch_size=5,
    )
    keep, rows = counted(batch)
    expected = torch.zeros(5, 4)
    for row, numbers in zip((0, 1, 3), WEIGHTED[name], strict=True):
        expected[row, KEEP[row]] = torch.tensor(numbers, dtype=torch.float32)
    found = build(name)(keep, GROUP, rows)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(unit_weights(rows, all_sum=alone), torch.tensor([1, 3, 0, 0.5, 0]) / 4.5)
    torch.testing.assert_close(tokens_of_rows(batch), torch.tensor([2.0, 2, 0, 1, 0]))


@pytest.mark.parametrize("name", sorted(BY_ROW))
def test_weights_of_one_change_no_bit(name):
    keep = torch.rand(64, 50, generator=torch.Generator().manual_seed(0)) < 0.6
    group, ones = torch.arange(64) // 3, {"token_weights": torch.ones(64, 50), "row_weights": torch.ones(64)}
    keep, rows = counted(TensorDict({"loss_mask": keep}, batch_size=64))
    weighted, heavy = counted(TensorDict({"loss_mask": keep, **ones}, batch_size=64))
    assert torch.equal(build(name)(weighted, group, heavy), build(name)(keep, group, rows))
    assert torch.equal(unit_weights(heavy, all_sum=alone), unit_weights(rows, all_sum=alone))


def test_groups_of_other_ranks_may_bear_the_same_number():
    """A rank sees its own groups only; two ranks with one group each make two groups."""
    found = group_mean(KEEP[:2], GROUP[:2], all_sum=lambda groups: groups + 1)
    torch.testing.assert_close(found, KEEP[:2] / 8)
