"""Pauses between repeated calls."""

from types import SimpleNamespace

from rft.remote.retry import Backoff


def test_pauses_double_up_to_the_longest_and_start_again():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(4)] == [0.5, 1.0, 2.0, 3.0]
    backoff.reset()
    assert backoff.next() == 0.5


def test_a_reset_shortens_the_next_pause_and_not_the_one_that_has_started():
    clock = SimpleNamespace(now=5.0)
    backoff = Backoff(2.0, 8.0, lambda: clock.now)
    assert not backoff.pausing
    backoff.start()
    clock.now = 6.9
    backoff.reset()
    assert backoff.pausing
    clock.now = 7.0
    assert not backoff.pausing
    backoff.start()
    backoff.start()  # of 4 s
    clock.now = 10.9
    assert backoff.pausing
