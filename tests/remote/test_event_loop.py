"""An event loop in a thread."""

import asyncio
import gc
import os
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


def test_a_closed_loop_ends_its_tasks_and_leaves_no_descriptor_to_the_garbage_collector():
    ended = []

    async def waits():
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(threading.current_thread().name)

    async def each():
        try:
            yield 1
            yield 2
        finally:
            ended.append("generator")

    async def begins():
        async for _ in each():
            break

    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(5):
            loop = EventLoop(f"loop {number}")
            waiting = loop.submit(waits())
            loop.run(begins())
            loop.close()
            assert waiting.cancelled() and sorted(ended) == ["generator", f"loop {number}"]
            ended.clear()
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()
