"""The order in which rows are drawn."""

import pytest

from rft.data.order import Cursor


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
