"""The order in which rows are drawn."""

import pytest
import torch

from rft.data.sampler import RowSampler


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
    sampler = RowSampler(range(10), seed=3)
    taken = [pair for number in (4, 4, 1, 11, 10) for pair in sampler.take(number)]
    assert [position for position, _ in taken] == list(range(30))
    epochs = [[row for _, row in taken[start : start + 10]] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_seed_changes_the_order_and_nothing_else_does():
    assert RowSampler(range(10), seed=3).take(25) == RowSampler(range(10), seed=3).take(25)
    assert RowSampler(range(10), seed=3).take(10) != RowSampler(range(10), seed=4).take(10)


def test_without_a_shuffle_every_epoch_has_the_order_of_the_rows():
    sampler = RowSampler(range(3), seed=3, shuffle=False)
    assert sampler.take(2) + sampler.take(5) == [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1), (5, 2), (6, 0)]
    assert sampler.take(3, torch.tensor([1.0, 0.0, 1.0])) == [(8, 2), (9, 0), (11, 2)], "row 1 has no weight"


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("position", [0, 9, 10, 17, 40])
def test_a_sampler_continues_anywhere(position, shuffle):
    whole, later = RowSampler(range(10), 3, shuffle), RowSampler(range(10), 3, shuffle)
    whole.take(position)
    later.position = position
    assert later.take(13) == whole.take(13)


def test_a_sampler_does_not_continue_with_other_rows():
    state = RowSampler(range(7), 0).state_dict()
    message = "data.train has 8 rows, and had 7 when the checkpoint was written.*resume=never"
    with pytest.raises(ValueError, match=message):
        RowSampler(range(8), 0).load_state_dict(state)


def test_more_than_an_epoch_at_once():
    taken = [row for _, row in RowSampler(range(3), seed=0).take(9)]
    assert [sorted(taken[start : start + 3]) for start in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_rows_without_weight_are_passed_over_with_their_positions():
    plain = RowSampler(range(10), seed=3).take(30)
    weights = torch.ones(10)
    weights[[2, 7]] = 0.0
    sampler = RowSampler(range(10), seed=3)
    taken = sampler.take(5) + sampler.take(12, weights)
    assert taken == plain[:5] + [pair for pair in plain[5:] if pair[1] not in (2, 7)][:12]
    assert sampler.position == taken[-1][0] + 1


def test_the_first_draw_by_weight_comes_in_proportion_to_its_weight():
    weights = torch.tensor([0.5, 0.0, 1.0, 2.5], dtype=torch.float64)
    sampler = RowSampler(range(4), seed=0)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[sampler.take_by_weight(1, weights)[0][1]] += 1
    assert counts[1] == 0
    expected = 1000 * weights[[0, 2, 3]]
    assert ((counts[[0, 2, 3]] - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom, p = 0.001


def test_the_second_draw_by_weight_comes_in_proportion_among_those_left():
    weights = torch.tensor([1.0, 1.0, 8.0], dtype=torch.float64)
    sampler = RowSampler(range(3), seed=1)
    pairs = [tuple(row for _, row in sampler.take_by_weight(2, weights)) for _ in range(4000)]
    assert all(one != two for one, two in pairs)
    second = sum(two == 2 for one, two in pairs if one != 2) / sum(one != 2 for one, _ in pairs)
    assert second == pytest.approx(8 / 9, abs=0.04)


def test_drawing_more_by_weight_than_there_are_puts_all_back():
    sampler = RowSampler(range(4), seed=2)
    taken = sampler.take_by_weight(8, torch.tensor([1.0, 0.0, 5.0, 0.1], dtype=torch.float64))
    assert [position for position, _ in taken] == list(range(8))
    rows = [row for _, row in taken]
    assert sorted(rows[:3]) == sorted(rows[3:6]) == [0, 2, 3] and len(set(rows[6:])) == 2
    assert sampler.position == 8


def test_draws_by_weight_continue_anywhere_and_depend_on_the_seed():
    weights = torch.rand(50, dtype=torch.float64)
    whole, later = RowSampler(range(50), seed=3), RowSampler(range(50), seed=3)
    whole.take_by_weight(7, weights)
    later.position = 7
    assert later.take_by_weight(6, weights) == whole.take_by_weight(6, weights)
    equal = torch.ones(50, dtype=torch.float64)
    draws = [RowSampler(range(50), seed=seed).take_by_weight(6, equal) for seed in (3, 4)]
    assert draws[0] != draws[1]


def test_no_weight_at_all_is_refused():
    for draw in (RowSampler.take, RowSampler.take_by_weight):
        with pytest.raises(AssertionError, match="no row has weight"):
            draw(RowSampler(range(3), seed=0), 1, torch.zeros(3))
