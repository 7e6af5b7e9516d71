"""The mask of the most uncertain tokens: by hand, with ties, over ranks, without tokens."""

import pytest
import torch

from rft.algorithm.token_weights.gradient_mask import high_entropy, high_entropy_row
from tests.helpers import batch_of


def alone(tensor):
    return tensor


def test_high_entropy_by_hand():
    batch = batch_of([[False, True, True], [True, False, True], [True, True, True], [True, True, True]])
    entropy = torch.tensor([[9.0, 0.1, 0.7], [0.2, 9.0, 0.6], [0.3, 0.8, 0.4], [0.0, 0.0, 0.5]])
    expected = torch.zeros(4, 3, dtype=torch.bool)
    for rho, place in ((0.01, (2, 1)), (0.2, (0, 2)), (0.3, (1, 2))):  # 1, 2 and 3 of 10 tokens
        expected[place] = True
        assert torch.equal(high_entropy(entropy, batch, all_sum=alone, seed=0, rho=rho), expected)
    assert torch.equal(high_entropy(entropy, batch, all_sum=alone, seed=0, rho=1.0), batch["loss_mask"])


def test_the_share_is_met_where_all_entropies_are_equal():
    batch = batch_of(torch.ones(5, 8, dtype=torch.bool))
    masks = [high_entropy(torch.full((5, 8), 1.6), batch, all_sum=alone, seed=seed, rho=0.2) for seed in (1, 2)]
    assert masks[0].sum() == masks[1].sum() == 8
    assert not torch.equal(*masks)


def test_without_trained_tokens_or_rows_the_mask_is_empty():
    batch = batch_of(torch.zeros(2, 3, dtype=torch.bool))
    assert not high_entropy(torch.ones(2, 3), batch, all_sum=alone, seed=0, rho=0.2).any()
    assert high_entropy(torch.ones(0, 3), batch[:0], all_sum=alone, seed=0, rho=0.2).shape == (0, 3)


@pytest.mark.parametrize("tied", [False, True])
def test_the_mask_does_not_depend_on_ranks_order_or_padding(over_ranks, tied):
    generator = torch.Generator().manual_seed(0)
    entropy = torch.rand(10, 6, generator=generator)
    entropy = (entropy * 3).round() if tied else entropy
    batch = batch_of(torch.rand(10, 6, generator=generator) < 0.8)
    whole = high_entropy(entropy, batch, all_sum=alone, seed=4, rho=0.2)
    assert whole.sum() == int(0.2 * batch["loss_mask"].sum())
    wide = batch_of(torch.nn.functional.pad(batch["loss_mask"], (0, 5)))
    found = high_entropy(torch.nn.functional.pad(entropy, (0, 5), value=9.0), wide, all_sum=alone, seed=4, rho=0.2)
    assert torch.equal(found, torch.nn.functional.pad(whole, (0, 5)))

    order = torch.randperm(10, generator=generator)

    def part(rows, all_sum):
        return high_entropy(entropy[rows], batch[rows], all_sum=all_sum, seed=4, rho=0.2)

    assert torch.equal(torch.cat(over_ranks(part, order.tensor_split((0, 3, 4)))), whole[order])


def test_high_entropy_row_by_hand():
    keep = [[0, 1, 1, 1, 1], [1, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
    entropy = torch.tensor([[9.0, 0.1, 0.4, 0.3, 0.2], [0.6, 9, 9, 0.5, 9], [9, 9, 0.0, 9, 9], [9] * 5])
    batch = batch_of(torch.tensor(keep, dtype=torch.bool))
    shares = {0.2: (1, 1, 1, 0), 0.5: (2, 1, 1, 0), 0.74: (2, 1, 1, 0), 0.75: (3, 1, 1, 0), 1.0: (4, 2, 1, 0)}
    order = [[2, 3, 4, 1], [0, 3], [2], []]  # columns from the largest entropy
    for rho, counts in shares.items():
        expected = torch.zeros(4, 5, dtype=torch.bool)
        for row, count in enumerate(counts):
            expected[row, order[row][:count]] = True
        assert torch.equal(high_entropy_row(entropy, batch, seed=0, rho=rho), expected)


def test_the_share_of_a_row_is_met_where_all_entropies_are_equal():
    batch = batch_of(torch.ones(5, 8, dtype=torch.bool))
    masks = [high_entropy_row(torch.full((5, 8), 1.6), batch, seed=seed, rho=0.25) for seed in (1, 2)]
    assert all(mask.sum(1).tolist() == [2] * 5 for mask in masks)
    assert not torch.equal(*masks)
    assert len({tuple(row) for row in masks[0].tolist()}) > 1, "rows draw different tokens"


@pytest.mark.parametrize("tied", [False, True])
def test_the_mask_of_a_row_does_not_depend_on_other_rows_order_or_padding(tied):
    generator = torch.Generator().manual_seed(0)
    entropy = torch.rand(10, 6, generator=generator)
    entropy = (entropy * 3).round() if tied else entropy
    batch = batch_of(torch.rand(10, 6, generator=generator) < 0.8)
    whole = high_entropy_row(entropy, batch, seed=4, rho=0.4)
    wide = batch_of(torch.nn.functional.pad(batch["loss_mask"], (0, 5)))
    found = high_entropy_row(torch.nn.functional.pad(entropy, (0, 5), value=9.0), wide, seed=4, rho=0.4)
    assert torch.equal(found, torch.nn.functional.pad(whole, (0, 5)))
    order = torch.randperm(10, generator=generator)
    parts = [high_entropy_row(entropy[rows], batch[rows], seed=4, rho=0.4) for rows in order.tensor_split((0, 3, 4))]
    assert torch.equal(torch.cat(parts), whole[order])
