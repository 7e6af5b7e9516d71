"""Advantages: numbers by hand and degenerate batches."""

import logging
import math

import pytest
import torch

from rft.algorithm.advantage.baselines import _warn_of_single_rows, rloo, rloo_whitened
from rft.algorithm.advantage.group import dr_grpo, group_norm
from rft.algorithm.advantage.returns import estimate, gae, reinforce_pp
from rft.algorithm.statistics import whitened
from tests.helpers import batch_of

F64 = torch.float64


def alone(tensor):
    return tensor


def rows_of(advantage, scores, group, **options):
    """The advantage of every row, of rows with one trained token each."""
    scores = torch.as_tensor(scores, dtype=F64) if isinstance(scores, list) else scores
    batch = batch_of([[0, 1]] * len(scores), group)
    return advantage(scores, torch.zeros(len(scores), 2), batch, **options)["advantages"][:, 1]


SCORES, GROUP = [1.0, 2.0, 0.0, 4.0, 0.0, 0.0], [7, 3, 7, 3, 7, 7]


@pytest.mark.parametrize(
    ("scale", "first", "second"),
    [("group", 0.5 + 1e-6, 2**0.5 + 1e-6), ("batch", (77 / 30) ** 0.5 + 1e-6, (77 / 30) ** 0.5 + 1e-6), ("none", 1, 1)],
)
def test_group_norm_by_hand(scale, first, second):
    found = rows_of(group_norm, SCORES, GROUP, all_sum=alone, scale=scale)
    expected = [0.75 / first, -1 / second, -0.25 / first, 1 / second, -0.25 / first, -0.25 / first]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-14, atol=0)


def test_dr_grpo_by_hand():
    assert rows_of(dr_grpo, SCORES, GROUP).tolist() == [0.75, -1.0, -0.25, 1.0, -0.25, -0.25]


def test_rloo_whitened_by_hand():
    found = rows_of(rloo_whitened, [100.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], all_sum=alone)
    expected = [1.5, -0.5, -0.5, -0.5]  # 100 and -100/3 over the standard deviation 200/3
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-11, atol=0)
    found = rows_of(rloo_whitened, [1.0, 0.0, 6.0, 0.0], [0, 0, 1, 1], all_sum=alone)
    deviation = math.sqrt((1 + 1 + 36 + 36) / 3)  # of 1, -1, 6, -6: of the step, not of a group
    torch.testing.assert_close(found, torch.tensor([1.0, -1, 6, -6], dtype=F64) / deviation, rtol=1e-9, atol=0)


def test_rloo_by_hand():
    found = rows_of(rloo, [100.0, 0.0, 0.0, 0.0], [0, 0, 0, 0])
    torch.testing.assert_close(found, torch.tensor([100.0, -100 / 3, -100 / 3, -100 / 3], dtype=F64))


def test_rloo_is_dr_grpo_times_n_over_n_minus_1():
    scores = torch.randn(12, dtype=F64, generator=torch.Generator().manual_seed(0))
    group = [0] * 3 + [1] * 4 + [2] * 5
    n = torch.tensor(group, dtype=F64) + 3
    expected = rows_of(dr_grpo, scores, group) * n / (n - 1)
    torch.testing.assert_close(rows_of(rloo, scores, group), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "scores",
    [
        torch.tensor([0.3] * 7 + [5.0]),
        torch.tensor([0.3] * 7 + [5.0], dtype=F64),  # the mean of seven is not 0.3
        torch.tensor([0.3] * 6 + [0.30000004, 5.0]),  # one float32 further
    ],
)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_scores_and_groups_of_one_get_exactly_zero(scale, scores):
    group = [0] * 7 + [1]
    assert rows_of(group_norm, scores, group, all_sum=alone, scale=scale).tolist() == [0.0] * 8
    assert rows_of(dr_grpo, scores, group).tolist() == [0.0] * 8
    assert rows_of(rloo, scores, group).tolist() == [0.0] * 8


def test_rloo_warns_once_of_groups_of_one(caplog):
    _warn_of_single_rows.cache_clear()
    with caplog.at_level(logging.WARNING):
        rows_of(rloo, [1.0, 0.0], [0, 0])
        assert not caplog.records
        rows_of(rloo, [1.0], [0])
        rows_of(rloo, [1.0], [0])
    assert [record.message.split(":")[0] for record in caplog.records] == ["rloo"]


def test_the_score_of_a_row_without_trained_tokens_counts_in_its_group():
    batch = batch_of([[0, 1, 0, 1], [0, 0, 0, 0]])
    found = dr_grpo(torch.tensor([1.0, 0.0]), torch.zeros(2, 4), batch)["advantages"]
    assert found.tolist() == [[0.0, 0.5, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]]


def test_reinforce_pp_by_hand():
    batch = batch_of([[0, 1, 0, 1], [0, 0, 1, 0]])
    rewards = torch.tensor([[9, 1, 9, 2], [9, 9, -1, 9]], dtype=F64)  # 9: outside keep, to be ignored
    found = reinforce_pp(torch.zeros(2, dtype=F64), rewards, batch, all_sum=alone, gamma=0.5)["advantages"]
    # G = 1 + 0.5 * 2 = 2, 2 and -1: mean 1, variance (1 + 1 + 4) / 2
    sd = (3 + 1e-8) ** 0.5
    torch.testing.assert_close(found, torch.tensor([[0, 1, 0, 1], [0, 0, -2, 0]], dtype=F64) / sd)


def test_gae_by_hand():
    batch = batch_of([[0, 1, 0, 1, 0]], values=torch.tensor([[9, 1, 9, 2, 9]], dtype=F64))
    rewards = torch.tensor([[0, 0, 0, 4, 0]], dtype=F64)
    found = gae(torch.zeros(1), rewards, batch, all_sum=alone, gamma=0.5, lam=0.5, whiten=False)
    # delta_3 = 4 - 2 = 2; delta_1 = 0.5 * 2 - 1 = 0; A_1 = 0 + 0.25 * 2
    assert found["advantages"].tolist() == [[0, 0.5, 0, 2, 0]]
    assert found["returns"].tolist() == [[0, 1.5, 0, 4, 0]]


def test_gae_whitens_the_advantages_and_leaves_the_returns():
    batch = batch_of([[0, 1, 0, 1, 0]], values=torch.tensor([[9, 1, 9, 2, 9]], dtype=F64))
    rewards = torch.tensor([[0, 0, 0, 4, 0]], dtype=F64)
    found = gae(torch.zeros(1), rewards, batch, all_sum=alone, gamma=0.5, lam=0.5, whiten=True)
    assert found["returns"].tolist() == [[0, 1.5, 0, 4, 0]]
    torch.testing.assert_close(found["advantages"], torch.tensor([[0, -1, 0, 1, 0]], dtype=F64) * 0.5**0.5)


def test_gae_against_the_plain_definition():
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 6, 9, dtype=F64, generator=generator)
    keep = torch.rand(6, 9, generator=generator) < 0.6
    keep[0], keep[1] = False, True
    expected = torch.zeros_like(rewards)
    for row in range(6):
        steps = keep[row].nonzero().flatten().tolist()
        for i, t in enumerate(steps):
            for k, s in enumerate(steps[i:]):
                after = values[row, steps[i + k + 1]] if i + k + 1 < len(steps) else 0.0
                expected[row, t] += (0.9 * 0.8) ** k * (rewards[row, s] + 0.9 * after - values[row, s])
    torch.testing.assert_close(estimate(rewards, values, keep, 0.9, 0.8), expected, rtol=1e-12, atol=1e-12)


def test_estimate_with_nothing_trained():
    nothing = torch.zeros(2, 3)
    assert torch.equal(estimate(nothing + 1, nothing + 1, nothing.bool(), 1.0, 1.0), nothing)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_whitening_equal_values_gives_zero(count):
    mask = (torch.arange(8) < count)[None]
    found = whitened(torch.full((1, 8), 0.3), mask, alone)
    torch.testing.assert_close(found, torch.zeros(1, 8), rtol=0, atol=1e-10)
