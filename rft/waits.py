"""Says what this process waits for where another process, a server, a file system or a lock takes long."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SAY_AFTER_S = 10.0  # seconds of a wait after which it is said; then again each time when it has lasted twice as long

_due: dict[str, float] = {}  # seconds of a wait after which the next one is said, by the kind of the wait


class Reminder:
    """When a wait is said.

    Args:
        kind: of waits that a run has again and again, such as for the samples of a step. One of a kind is said only if
            it lasts twice as long as those that were said before. Empty: every wait is said.
    """

    def __init__(self, kind: str = "") -> None:
        self._kind = kind
        self._due = _due if kind else {}

    @property
    def after_s(self) -> float:
        """Seconds from the beginning of a wait until it is said."""
        return self._due.get(self._kind, SAY_AFTER_S)

    def postpone(self) -> None:
        """A wait has been said, by this process or by another one."""
        self._due[self._kind] = 2 * self.after_s

    def say(self, what: str, seconds: float) -> None:
        """Logs what the process waits for, and since how many seconds."""
        self.postpone()
        logging.getLogger(__name__).warning("%s, %.0f s", what, seconds)


@contextmanager
def waiting(what: str | Callable[[], str], kind: str = "") -> Iterator[None]:
    """The block waits; its deadline is its own. A thread says so while the wait takes long.

    Args:
        what: who waits for what; a function is called when the wait is said.
        kind: see `Reminder`.
    """
    reminder, ended, since = Reminder(kind), threading.Event(), time.monotonic()

    def watch() -> None:
        while not ended.wait(since + reminder.after_s - time.monotonic()):
            reminder.say(what if isinstance(what, str) else what(), time.monotonic() - since)

    threading.Thread(target=watch, daemon=True, name="wait").start()
    try:
        yield
    finally:
        ended.set()
