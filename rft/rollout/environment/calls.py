"""Calls functions of the user beside the event loop: each in a thread of its own, with a deadline."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from rft.remote.event_loop import call_in


class CallFailed(Exception):
    """A call of the user's code failed.

    Attributes:
        reason: the class of the error, or "deadline".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


async def call(name: str, function: Callable[[], Any], deadline_s: float | None) -> Any:
    """What a function returns; if that can be awaited, what it then returns.

    A thread cannot be ended: after the deadline its result is dropped, and it does not keep the process from ending.

    Args:
        name: of the function, for messages.

    Raises:
        CallFailed: the function raised an error or missed the deadline.
    """
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            found = await _in_thread(function)
            return await found if inspect.isawaitable(found) else found
    except TimeoutError as error:
        if deadline.expired():
            raise CallFailed("deadline", f"{name} did not end in {deadline_s:g} s") from error
        raise CallFailed("TimeoutError", f"{name} raised TimeoutError: {error}") from error
    except (Exception, SystemExit) as error:  # a function of the user may raise anything
        kind = type(error).__name__
        raise CallFailed(kind, f"{name} raised {kind}: {error}") from error


def _in_thread(function: Callable[[], Any]) -> "asyncio.Future[Any]":
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # cancelled at the deadline
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function()
        except (Exception, SystemExit) as raised:  # noqa: BLE001  # a function of the user may raise anything
            error = RuntimeError(str(raised)) if isinstance(raised, StopIteration) else raised  # no future takes it
        call_in(loop, settle, value, error)

    threading.Thread(target=run, daemon=True, name="environment").start()
    return future
