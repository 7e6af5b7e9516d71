"""Rows that are redrawn with weight |score|^power."""

import pytest
import torch

from rft.algorithm.selection import resample_counts


def test_as_many_rows_as_before_and_none_of_weight_zero():
    scores = torch.tensor([0.0, 1.0, -2.0, 0.0, 3.0, 0.0])
    for seed in range(50):
        counts = resample_counts(scores, 2.0, seed)
        assert counts.sum() == 6 and not counts[scores == 0].any()
    assert len({tuple(resample_counts(scores, 2.0, seed).tolist()) for seed in range(50)}) > 10


@pytest.mark.parametrize(
    ("power", "shares"), [(0.0, [0.25] * 4), (1.0, [0.1, 0.2, 0.3, 0.4]), (2.0, [1 / 30, 4 / 30, 0.3, 16 / 30])]
)
def test_the_shares_are_those_of_the_weights(power, shares):
    scores = torch.tensor([1.0, -2.0, 3.0, -4.0])
    counts = sum(resample_counts(scores, power, seed) for seed in range(4000)).double()
    assert (counts / counts.sum()).tolist() == pytest.approx(shares, abs=0.015)


def test_scores_of_nothing_keep_every_row():
    assert resample_counts(torch.zeros(3), 2.0, 0).tolist() == [1, 1, 1]
    assert resample_counts(torch.zeros(0), 2.0, 0).tolist() == []
