"""Advantages of single tokens: numbers by hand, identities, lone rows, empty ranks."""

import pytest
import torch

from rft.algorithm.advantage.group import dr_grpo
from rft.algorithm.advantage.returns import (
    gae,
    gae_length_adaptive,
    optimal_token_baseline,
    reinforce,
    reinforce_pp,
    remax,
)
from rft.algorithm.scores.rewards import token_rewards
from rft.algorithm.statistics import whitened
from tests.helpers import batch_of

F64 = torch.float64
KEEP = [[0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]]
REWARDS = torch.tensor([[9, 1, 9, 2], [9, 9, -1, 9], [9, 9, 9, 9]], dtype=F64)  # 9: outside keep, to be ignored
NAN = torch.nan


def alone(tensor):
    return tensor


def random_batch():
    generator = torch.Generator().manual_seed(3)
    rewards, values = torch.randn(2, 5, 9, dtype=F64, generator=generator)
    keep = torch.rand(5, 9, generator=generator) < 0.6
    keep[0] = False
    return rewards, batch_of(keep, [0, 0, 1, 1, 1], values=values)


def test_reinforce_by_hand():
    found = reinforce(torch.zeros(3, dtype=F64), REWARDS, batch_of(KEEP), gamma=0.5)["advantages"]
    assert found.tolist() == [[0, 2, 0, 2], [0, 0, -1, 0], [0, 0, 0, 0]]


def test_reinforce_is_gae_without_a_critic():
    rewards, batch = random_batch()
    batch["values"] = torch.zeros_like(rewards)
    options = {"all_sum": alone, "gamma": 0.9, "lam": 1.0, "whiten": False}
    found = reinforce(torch.zeros(5), rewards, batch, gamma=0.9)["advantages"]
    assert torch.equal(found, gae(torch.zeros(5), rewards, batch, **options)["advantages"])


def test_reinforce_pp_is_whitened_reinforce():
    rewards, batch = random_batch()
    expected = whitened(reinforce(torch.zeros(5), rewards, batch, gamma=0.9)["advantages"], batch["loss_mask"], alone)
    assert torch.equal(reinforce_pp(torch.zeros(5), rewards, batch, all_sum=alone, gamma=0.9)["advantages"], expected)


def test_remax_by_hand():
    batch = batch_of(KEEP, greedy_scores=torch.tensor([0.5, 0.25, 7.0]))
    found = remax(torch.zeros(3, dtype=F64), REWARDS, batch)["advantages"]
    assert found.tolist() == [[0, 2.5, 0, 1.5], [0, 0, -1.25, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("alpha", "first"),
    [(0.5, [0, 2.25, 0, 2.5, 0, 3, 4]), (0.1, [0, 1, 0, 1, 0, 1, 4])],  # lam 1 - 1 / (0.5 * 4); 0, not -1.5
)
def test_length_adaptive_gae_by_hand(alpha, first):
    values = torch.tensor([[9, 1, 9, 2, 9, 3, 4], [9, 9, 9, 9, 2, 9, 9]], dtype=F64)
    rewards = torch.tensor([[0, 0, 0, 0, 0, 0, 8], [0, 0, 0, 0, 1, 0, 0]], dtype=F64)  # deltas 1, 1, 1 and 4; and -1
    batch = batch_of([[0, 1, 0, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0, 0]], values=values)
    found = gae_length_adaptive(torch.zeros(2), rewards, batch, all_sum=alone, gamma=1.0, alpha=alpha, whiten=False)
    assert found["advantages"].tolist() == [first, [0, 0, 0, 0, -1, 0, 0]]
    assert found["returns"].tolist() == [[0, 8, 0, 8, 0, 8, 8], [0, 0, 0, 0, 1, 0, 0]]


def test_length_adaptive_gae_of_very_long_rows_is_gae_with_lam_1():
    rewards, batch = random_batch()
    expected = gae(torch.zeros(5), rewards, batch, all_sum=alone, gamma=0.9, lam=1.0, whiten=True)
    found = gae_length_adaptive(torch.zeros(5), rewards, batch, all_sum=alone, gamma=0.9, alpha=1e15, whiten=True)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def energies(*rows):
    """`old_logprobs` and `sum_p_squared` for which 1 - 2 p + sum p^2 is the given number; p = 1/2, so the sum is it."""
    return {
        "old_logprobs": torch.full((len(rows), len(rows[0])), 0.5, dtype=F64).log(),
        "sum_p_squared": torch.tensor(rows, dtype=F64),
    }


def test_optimal_token_baseline_by_hand():
    keep = [[0, 1, 0, 1], [0, 1, 1, 0]]
    batch = batch_of(keep, **energies([NAN, 1, NAN, 2], [NAN, 3, 0, NAN]))
    rewards = torch.tensor([[0, 1, 0, 3], [0, 0, 2, 0]], dtype=F64)
    found = optimal_token_baseline(torch.zeros(2), rewards, batch)["advantages"]
    # t = 1: G 4 and 2, W 1 and 3: baseline 2.5; t = 2: G 3 and 2, W 3 and 3: baseline 2.5
    torch.testing.assert_close(found, torch.tensor([[0, 1.5, 0, 0.5], [0, -0.5, -0.5, 0]], dtype=F64))


def test_optimal_token_baseline_with_equal_energies_is_dr_grpo():
    keep = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]).bool()
    scores = torch.tensor([1, 0, 0.5, -2, 4], dtype=F64)
    batch = batch_of(keep, [4, 4, 2, 2, 2], **energies(*[[0.3] * 4] * 5))
    _, rewards = token_rewards(scores, keep, None, 0.0)
    found = optimal_token_baseline(scores, rewards, batch)["advantages"]
    torch.testing.assert_close(found, dr_grpo(scores, rewards, batch)["advantages"], rtol=1e-14, atol=1e-14)


def test_optimal_token_baseline_of_what_has_nothing_to_compare_is_exactly_zero():
    """The third token of the first row has no other; the second group is one row; the third is tied in float32."""
    keep = torch.tensor([[0, 1, 1, 1]] + [[0, 1, 1, 0]] * 2 + [[0, 1, 0, 1]] * 7).bool()
    scores = torch.tensor([1.0, 0.0, 5.0] + [0.3] * 6 + [0.30000004])
    generator = torch.Generator().manual_seed(0)
    columns = {
        "sum_p_squared": torch.rand(10, 4, generator=generator),
        "old_logprobs": -torch.rand(10, 4, generator=generator),
    }
    _, rewards = token_rewards(scores, keep, None, 0.0)
    found = optimal_token_baseline(scores, rewards, batch_of(keep, [0, 0, 1] + [2] * 7, **columns))["advantages"]
    assert found[0, 1] > 0 > found[1, 1]
    assert found[0, 3] == 0
    assert not found[2:].any()
    assert found.dtype == torch.float32


def test_optimal_token_baseline_of_a_policy_without_noise_is_zero():
    """Energy 0, up to a rounding below it: whatever the advantage, there is no gradient."""
    columns = {"old_logprobs": torch.zeros(2, 2), "sum_p_squared": torch.ones(2, 2) - 1e-7}
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    found = optimal_token_baseline(torch.zeros(2), rewards, batch_of([[0, 1]] * 2, **columns))["advantages"]
    assert not found.any()


@pytest.mark.parametrize(
    ("advantage", "options"),
    [
        (reinforce, {"gamma": 1.0}),
        (reinforce_pp, {"gamma": 1.0}),
        (remax, {}),
        (optimal_token_baseline, {}),
        (gae, {"gamma": 1.0, "lam": 0.9, "whiten": True}),
        (gae_length_adaptive, {"gamma": 1.0, "alpha": 0.05, "whiten": True}),
    ],
)
def test_a_rank_without_rows_sums_as_often_as_the_others(advantage, options):
    summed = advantage in (reinforce_pp, gae, gae_length_adaptive)

    def calls_of(rows):
        calls = []
        names = ("values", "old_logprobs", "sum_p_squared")
        columns = {name: torch.zeros(rows, 3) for name in names} | {"greedy_scores": torch.zeros(rows)}
        batch = batch_of(torch.ones(rows, 3), [0] * rows, **columns)
        batch["group"] = batch["group"].long()
        supplied = {"all_sum": lambda local: calls.append(local.shape) or local} if summed else {}
        found = advantage(torch.zeros(rows), torch.zeros(rows, 3), batch, **options, **supplied)
        assert all(column.shape == (rows, 3) for column in found.values())
        return calls

    assert calls_of(0) == calls_of(2)
    assert len(calls_of(0)) == 2 * summed
