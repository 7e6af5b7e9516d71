"""Selection over ranks: against plain sorting, with ties, the same for every split into ranks and order of rows."""

import math

import pytest
import torch

from rft.algorithm.order_statistics import crossing, exact_mean, largest, largest_of_rows, ordered, share_of, up_to_mean
from rft.batch.counter_rng import token_draws

F64 = torch.float64
SPLITS = [(slice(0, 9),), (slice(0, 4), slice(4, 9)), (slice(0, 0), slice(0, 1), slice(1, 9))]


def alone(tensor):
    return tensor


def random_rows(seed, shape=(9, 13)):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, dtype=F64, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[3] = False
    return torch.where(mask, values, torch.nan), mask, token_draws(seed, torch.arange(shape[0]), torch.arange(shape[1]))


def test_ordered_keeps_the_order():
    numbers = [-math.inf, -1e300, -2.0, -1.0, -5e-324, 0.0, 5e-324, 1.0, 1.0 + 2**-52, 2.0, 1e300, math.inf]
    keys = ordered(torch.tensor(numbers, dtype=F64))
    assert (keys.diff() > 0).all()
    assert ordered(torch.tensor([-0.0])) == ordered(torch.tensor([0.0]))


def test_crossing_by_hand():
    keys = torch.tensor([5, -3, 2**62, -(2**63), 0, 5])
    weights = torch.tensor([2, 1, 9, 0, 4, 1])
    running = [(0, -3), (1, 0), (4, 0), (5, 5), (7, 5), (8, 2**62), (16, 2**62), (17, 2**63 - 1)]
    assert [(limit, crossing(keys, weights, limit, alone).item()) for limit, _ in running] == running
    assert crossing(keys, weights, -1, alone) == -(2**63)


@pytest.mark.parametrize("count", [0, 1, 2, 20, 10**6])
def test_largest_are_those_of_sorting(count):
    values, mask, draws = random_rows(0)
    found = largest(values, mask, count, draws, alone)
    best = values[mask].sort(descending=True).values[:count]
    assert torch.equal(values[found].sort(descending=True).values, best)
    assert not (found & ~mask).any()


def test_equal_values_at_the_boundary_are_drawn_and_the_count_is_met():
    values = torch.tensor([[3.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    draws = torch.tensor([[0.1, 0.2, 0.9], [0.8, 0.99, 0.5]], dtype=F64)
    assert largest(values, mask, 3, draws, alone).tolist() == [[True, False, False], [True, False, True]]
    assert largest(values, mask, 1, draws, alone).sum() == 1
    assert largest(torch.zeros(2, 3), mask, 2, draws, alone).tolist() == [[False, False, False], [True, True, False]]


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("tied", [False, True])
def test_largest_do_not_depend_on_ranks(over_ranks, splits, tied):
    values, mask, draws = random_rows(1)
    values = values.round() if tied else values
    whole = largest(values, mask, 17, draws, alone)
    assert whole.sum() == 17
    found = over_ranks(lambda rows, all_sum: largest(values[rows], mask[rows], 17, draws[rows], all_sum), splits)
    assert torch.equal(torch.cat(found), whole)


def test_the_largest_of_a_row_with_ties():
    values = torch.tensor([[2.0, 1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, False], [True] * 5])
    draws = torch.tensor([[0.1, 0.2, 0.4, 0.3, 0.9], [0.5, 0.1, 0.4, 0.2, 0.3]])
    found = largest_of_rows(values, mask, torch.tensor([2, 3]), draws)
    assert found.tolist() == [[True, False, True, False, False], [True, False, True, False, True]]


def test_nothing_to_select_from():
    values, mask, draws = random_rows(2)
    nothing = torch.zeros_like(mask)
    assert not largest(values, nothing, 3, draws, alone).any()
    assert not up_to_mean(values, nothing, 0.1, alone).any()
    assert exact_mean(values, nothing, alone) == 0
    assert share_of(0.5, nothing, alone) == 1
    assert largest(values[:0], mask[:0], 3, draws[:0], alone).shape == (0, 13)


def test_up_to_mean_by_hand():
    values = torch.tensor([[0.0, 0.25, 0.5, 0.75], [3.5, 99.0, 0.5, 0.0]], dtype=F64)
    mask = torch.tensor([[True, True, True, True], [True, False, True, False]])
    for bound, most in [
        (0.2, 0.25),  # mean 0.125; with both of 0.5 it is 0.3125
        (0.3125, 0.5),
        (0.4, 0.75),  # mean 0.4
        (0.9, 0.75),
        (0.917, 3.5),  # all: 5.5 / 6
        (0.0, 0.0),
    ]:
        assert torch.equal(up_to_mean(values, mask, bound, alone), mask & (values <= most)), bound
    assert not up_to_mean(values + 1, mask, 0.5, alone).any()


@pytest.mark.parametrize("bound", [0.01, 0.1, 0.5, 5.0])
def test_up_to_mean_is_taking_the_largest_out_one_by_one(over_ranks, bound):
    values, mask, _ = random_rows(3)
    values = values.square()
    kept = sorted(values[mask].tolist())
    while kept and sum(kept) / len(kept) > bound:
        kept.pop()
    found = up_to_mean(values, mask, bound, alone)
    assert sorted(values[found].tolist()) == kept
    for splits in SPLITS:
        again = over_ranks(lambda rows, all_sum: up_to_mean(values[rows], mask[rows], bound, all_sum), splits)
        assert torch.equal(torch.cat(again), found)


@pytest.mark.parametrize(
    ("share", "tokens", "count"), [(2e-4, 10000, 2), (2e-4, 9999, 1), (2e-4, 3, 1), (0.29, 100, 29), (0.2, 15, 3)]
)
def test_share_of_by_hand(share, tokens, count):
    mask = torch.arange(20000).reshape(100, 200) < tokens
    assert share_of(share, mask, alone) == count


def test_exact_mean_is_one_number_in_every_order(over_ranks):
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(9, 1000, dtype=F64, generator=generator) * 10.0 ** torch.arange(-5, 4)[:, None]
    mask = torch.ones_like(values, dtype=torch.bool)
    mean = exact_mean(values, mask, alone)
    assert mean.item() == pytest.approx(math.fsum(values.flatten().tolist()) / 9000, rel=1e-12)
    assert torch.equal(exact_mean(values.flip(0), mask, alone), mean)
    for splits in SPLITS:
        means = over_ranks(lambda rows, all_sum: exact_mean(values[rows], mask[rows], all_sum), splits)
        assert (torch.stack(means) == mean).all()
