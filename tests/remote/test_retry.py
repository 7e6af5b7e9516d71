"""The retry policy: which failures are repeated, how often, and after which pauses."""

import asyncio
import math

import pytest

from rft.remote.http_client import BadResponse, RequestFailed, RequestRefused
from rft.remote.retry import Backoff, RetryPolicy

POLICY = RetryPolicy(concurrency=1, retries=2, answer_s=0.2)


class Scripted:
    """Raises the errors of a script, one per call, then returns 7."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self):
        self.calls += 1
        if self.errors:
            error = self.errors.pop(0)
            if error is None:
                await asyncio.sleep(5)
            raise error
        return 7


def repeat(script, policy=POLICY, backoff=None):
    return asyncio.run(policy.repeat("rank 0 waits for an answer", script, backoff or Backoff(0.001, 0.002)))


def test_pauses_double_up_to_the_longest_and_start_again():
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(4)] == [0.5, 1.0, 2.0, 3.0]
    backoff.reset()
    assert backoff.next() == 0.5


@pytest.mark.parametrize(
    "error",
    [
        RequestFailed("gone"),
        BadResponse("no JSON"),
        *(RequestRefused("busy", status) for status in (408, 409, 429, 500, 503)),
        None,
    ],
)
def test_a_transient_failure_is_repeated(error):
    script = Scripted(error, error)
    assert repeat(script) == 7 and script.calls == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_that_time_does_not_cure_is_not_repeated(status):
    script = Scripted(RequestRefused(f"status {status}", status))
    with pytest.raises(RequestFailed, match=rf"^status {status} \(call 1 of 3\)$"):
        repeat(script)
    assert script.calls == 1


def test_the_last_failure_is_raised():
    script = Scripted(RequestFailed("one"), RequestFailed("two"), None)
    with pytest.raises(RequestFailed, match=r"^rank 0 waits for an answer, 0.2 s \(call 3 of 3\)$"):
        repeat(script)
    assert script.calls == 3


def test_other_errors_are_raised_at_once():
    script = Scripted(KeyError("x"))
    with pytest.raises(KeyError):
        repeat(script)
    assert script.calls == 1


def test_pauses_come_between_calls(monkeypatch):
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("rft.remote.retry.asyncio.sleep", sleep)
    with pytest.raises(RequestFailed):
        repeat(Scripted(*[RequestFailed("x")] * 9), RetryPolicy(1, 3, 1.0), Backoff(0.5, math.inf))
    assert pauses == [0.5, 1.0, 2.0]
