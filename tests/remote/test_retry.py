"""Pauses between repeated calls, and the deadline of a request."""

import asyncio

import pytest

from rft.remote.retry import Backoff, ServerPolicy


def test_pauses_double_up_to_the_longest_and_start_again():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(4)] == [0.5, 1.0, 2.0, 3.0]
    backoff.reset()
    assert backoff.next() == 0.5


def test_a_request_ends_at_its_deadline_by_name():
    policy = ServerPolicy(concurrency=1, retries=2, answer_s=0.05, start_s=1.0, poll_s=1.0)

    async def answer(seconds):
        await asyncio.sleep(seconds)
        return 7

    assert asyncio.run(policy.within_deadline("rank 0 waits", answer(0.0))) == 7
    with pytest.raises(TimeoutError, match=r"^rank 0 waits, 0\.05 s$"):
        asyncio.run(policy.within_deadline("rank 0 waits", answer(5.0)))
