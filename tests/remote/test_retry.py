"""Pauses between repeated calls, and the deadline of a request."""

import asyncio
from types import SimpleNamespace

import pytest

from rft.remote.retry import Backoff, ServerPolicy


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


def test_a_request_ends_at_its_deadline_by_name():
    policy = ServerPolicy(concurrency=1, retries=2, answer_s=0.05, start_s=1.0, poll_s=1.0)

    async def answer(seconds):
        await asyncio.sleep(seconds)
        return 7

    assert asyncio.run(policy.within_deadline("rank 0 waits", answer(0.0))) == 7
    with pytest.raises(TimeoutError, match=r"^rank 0 waits, 0\.05 s$"):
        asyncio.run(policy.within_deadline("rank 0 waits", answer(5.0)))
