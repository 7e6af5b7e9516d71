import asyncio
import threading
import time

import pytest

from rft.rollout.environment.instance import CallFailed, call
from tests.conftest import SOON_S


def run(function, deadline_s=SOON_S):
    return asyncio.run(call("f", function, deadline_s))


async def later(value):
    await asyncio.sleep(0.01)
    return value


def raising(error):
    def function():
        raise error

    return function


def test_plain_and_async_functions():
    assert run(lambda: 3) == 3 and run(lambda: later(4)) == 4 and run(lambda: None, None) is None


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (KeyError("k"), "KeyError", "f raised KeyError: 'k'"),
        (SystemExit(2), "SystemExit", "f raised SystemExit: 2"),
        (TimeoutError("slow"), "TimeoutError", "f raised TimeoutError: slow"),
        (StopIteration("end"), "StopIteration", "f raised StopIteration: end"),
    ],
)
def test_an_error_has_its_reason(error, reason, message):
    with pytest.raises(CallFailed) as found:
        run(raising(error))
    assert (found.value.reason, str(found.value)) == (reason, message)


def test_a_deadline_does_not_wait_for_the_function():
    ended = threading.Event()
    for function in (lambda: ended.wait(SOON_S), lambda: asyncio.sleep(SOON_S)):
        start = time.monotonic()
        with pytest.raises(CallFailed, match=r"f did not end in 0\.1 s") as found:
            run(function, 0.1)
        assert found.value.reason == "deadline" and time.monotonic() - start < SOON_S
    ended.set()
