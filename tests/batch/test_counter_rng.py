"""Hashes and the random numbers made of them."""

import math

import torch

from rft.batch.counter_rng import GOLDEN, mix, shift, signed, token_draws


def test_mix_is_splitmix64():
    states = torch.tensor([signed(1234567 + k * GOLDEN) for k in (1, 2, 3)])
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, signed(9817491932198370423)]


def test_golden_is_two_to_the_64_over_the_golden_ratio():
    assert GOLDEN % 2**64 == 0x9E3779B97F4A7C15


def test_shift_brings_in_zeros():
    assert shift(torch.tensor([-1, 8]), 60).tolist() == [15, 0]


def test_draws_of_tokens_depend_on_seed_row_and_column_alone():
    units = torch.tensor([5, 9, -3])
    draws = token_draws(7, units, torch.arange(4))
    assert draws.shape == (3, 4) and draws.dtype == torch.float64
    assert torch.equal(token_draws(7, units[[2, 0]], torch.arange(4)), draws[[2, 0]])
    assert torch.equal(token_draws(7, units, torch.arange(9))[:, :4], draws)
    assert torch.equal(token_draws(7 + 2**64, units, torch.arange(4)), draws)
    assert torch.equal(token_draws(7, units[:0], torch.arange(4)), draws[:0])
    other = torch.cat([draws, token_draws(8, units, torch.arange(4))])
    assert len(other.unique()) == 24


def test_no_seed_gives_the_rows_of_another_one():
    assert not (
        token_draws(0, torch.tensor([1]), torch.arange(4)) == token_draws(1, torch.tensor([0]), torch.arange(4))
    ).any()


def test_draws_of_tokens_are_uniform_in_every_direction():
    for draws in (
        token_draws(0, torch.arange(20000), torch.tensor([3])),
        token_draws(0, torch.tensor([3]), torch.arange(20000)),
        torch.cat([token_draws(seed, torch.tensor([3]), torch.tensor([3])) for seed in range(5000)]),
    ):
        draws = draws.flatten()
        assert draws.min() >= 0 and draws.max() < 1
        expected = len(draws) / 50
        counts = torch.histc(draws, bins=50, min=0, max=1)
        assert ((counts - expected) ** 2 / expected).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001
        neighbours = torch.corrcoef(torch.stack([draws[:-1], draws[1:]]))[0, 1]
        assert abs(neighbours) < 4 / math.sqrt(len(draws))
