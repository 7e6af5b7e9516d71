"""The order in which rows are drawn."""

import pytest
import torch

from rft.data.sampler import Cursor, Lottery


def test_every_epoch_holds_every_row_once_in_an_order_of_its_own():
    cursor = Cursor(10, seed=3)
    taken = [pair for number in (4, 4, 1, 11, 10) for pair in cursor.take(number)]
    assert [position for position, _ in taken] == list(range(30))
    epochs = [[row for _, row in taken[start : start + 10]] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_seed_changes_the_order_and_nothing_else_does():
    assert Cursor(10, seed=3).take(25) == Cursor(10, seed=3).take(25)
    assert Cursor(10, seed=3).take(10) != Cursor(10, seed=4).take(10)


@pytest.mark.parametrize("position", [0, 9, 10, 17, 40])
def test_a_cursor_goes_on_anywhere(position):
    whole, later = Cursor(10, seed=3), Cursor(10, seed=3)
    whole.take(position)
    later.position = position
    assert later.take(13) == whole.take(13)


def test_more_than_an_epoch_at_once():
    taken = [row for _, row in Cursor(3, seed=0).take(9)]
    assert [sorted(taken[start : start + 3]) for start in (0, 3, 6)] == [[0, 1, 2]] * 3


def test_rows_without_weight_are_passed_over_with_their_positions():
    plain = Cursor(10, seed=3).take(30)
    weights = torch.ones(10)
    weights[[2, 7]] = 0.0
    cursor = Cursor(10, seed=3)
    taken = cursor.take(5) + cursor.take(12, weights)
    assert taken == plain[:5] + [pair for pair in plain[5:] if pair[1] not in (2, 7)][:12]
    assert cursor.position == taken[-1][0] + 1


def test_the_first_of_a_lottery_comes_in_proportion_to_its_weight():
    weights = torch.tensor([0.5, 0.0, 1.0, 2.5], dtype=torch.float64)
    lottery = Lottery(4, seed=0)
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[lottery.take(1, weights)[0][1]] += 1
    assert counts[1] == 0
    expected = 1000 * weights[[0, 2, 3]]
    assert ((counts[[0, 2, 3]] - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom, p = 0.001


def test_the_second_of_a_lottery_comes_in_proportion_among_those_left():
    weights = torch.tensor([1.0, 1.0, 8.0], dtype=torch.float64)
    lottery = Lottery(3, seed=1)
    pairs = [tuple(row for _, row in lottery.take(2, weights)) for _ in range(4000)]
    assert all(one != two for one, two in pairs)
    second = sum(two == 2 for one, two in pairs if one != 2) / sum(one != 2 for one, _ in pairs)
    assert second == pytest.approx(8 / 9, abs=0.04)


def test_a_lottery_of_more_than_there_are_puts_all_back():
    lottery = Lottery(4, seed=2)
    taken = lottery.take(8, torch.tensor([1.0, 0.0, 5.0, 0.1], dtype=torch.float64))
    assert [position for position, _ in taken] == list(range(8))
    rows = [row for _, row in taken]
    assert sorted(rows[:3]) == sorted(rows[3:6]) == [0, 2, 3] and len(set(rows[6:])) == 2
    assert lottery.position == 8


def test_a_lottery_goes_on_anywhere_and_depends_on_its_seed():
    weights = torch.rand(50, dtype=torch.float64)
    whole, later = Lottery(50, seed=3), Lottery(50, seed=3)
    whole.take(7, weights)
    later.position = 7
    assert later.take(6, weights) == whole.take(6, weights)
    assert Lottery(50, seed=3).take(6) != Lottery(50, seed=4).take(6)


def test_no_weight_at_all_is_refused():
    for order in (Cursor(3, seed=0), Lottery(3, seed=0)):
        with pytest.raises(AssertionError, match="no row has weight"):
            order.take(1, torch.zeros(3))
