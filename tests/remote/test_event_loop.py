"""An event loop in a thread."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from rft.remote.event_loop import EventLoop
from tests.conftest import SOON_S


def test_coroutines_run_beside_this_thread_and_can_be_cancelled():
    loop = EventLoop("a loop")

    async def where():
        return threading.current_thread().name

    async def fails():
        raise ConnectionError("no server")

    assert loop.run(where()) == "a loop"
    with pytest.raises(ConnectionError):
        loop.run(fails())
    started = threading.Event()

    async def waits():
        started.set()
        await asyncio.sleep(100)

    waiting = loop.submit(waits())
    assert started.wait(SOON_S)
    waiting.cancel()
    with pytest.raises(CancelledError):
        waiting.result(SOON_S)
    loop.close()
    assert not loop.alive
    loop.close()
