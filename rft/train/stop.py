"""Signals and the time limit that stop a run after its current step, with a checkpoint."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from rft.distributed import World
from rft.errors import Stopped
from rft.logger.console import drop_output
from rft.logger.disk import write_text

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
STOPPED = "stopped.json"  # in the folder of a run that has stopped and can be continued, until it is
SAME_S = 1.0  # signals within so many seconds are one: a launcher and a process group may both deliver it
STARTED = time.monotonic()  # when the program was loaded
DURATION = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
UNITS = (86400, 3600, 60, 1)  # seconds of d, h, m, s
SHOW_CURSOR = b"\x1b[?25h"


def seconds_of(duration: str) -> int:
    """Seconds of a duration such as `3h50m`, `1d12h` or `90s`.

    Raises:
        ValueError: it is none; names the key `max_time`.
    """
    found = DURATION.fullmatch(duration)
    seconds = sum(int(number or 0) * unit for number, unit in zip(found.groups(), UNITS, strict=True)) if found else 0
    if seconds == 0:
        raise ValueError(f"max_time={duration!r}: write days, hours, minutes and seconds as in 3h50m, 1d12h or 90s")
    return seconds


@contextmanager
def recording_stop(world: World, folder: Path) -> Iterator[None]:
    """A run that stops in the block, and can be continued, says so in its folder. A collective then."""
    try:
        yield
    except Stopped as stopped:
        note = json.dumps({"step": stopped.step, "cause": stopped.cause})
        world.decide(lambda: write_text(folder / STOPPED, note))
        raise


class StopRequest:
    """Why the run has to stop, if it has to: a signal, or the time limit.

    Within the block, the first of `SIGNALS` is recorded, and a second one ends the process at once with status 128 +
    its number. The main thread records the first one, so that the step that it interrupts is the last; a thread
    receives them too, so that the second one ends a process that waits in a collective. Signals that the process
    ignores stay ignored: SIGINT in the background of a script, SIGHUP under nohup. A closed terminal may send SIGHUP
    more than once, which is one signal; what is printed to it is dropped.

    Args:
        max_time: the longest time since the program was loaded, see `seconds_of`; None for no limit.
        rank: rank 0 prints what happens next.
        raise_peer_failure: called at SIGTERM, which torchrun sends when another rank has failed.
        last: the number of the step after which the run stops; None for no such step.
    """

    def __init__(
        self, max_time: str | None, rank: int, raise_peer_failure: Callable[[], None], last: int | None = None
    ) -> None:
        self._limit = None if max_time is None else seconds_of(max_time)
        self._max_time = max_time
        self._rank = rank
        self._raise_peer_failure = raise_peer_failure
        self._last = last
        self._signal: signal.Signals | None = None
        self._printed = False

    def asked(self, step: int) -> bool:
        """Whether this process has to stop after this step."""
        if self._last is not None and step >= self._last:
            return True
        return self._signal is not None or (self._limit is not None and time.monotonic() - STARTED >= self._limit)

    def stopped(self, step: int) -> Stopped:
        """The exception that ends the run after this step, on every rank if one rank has to stop."""
        own = f"max_time={self._max_time}" if self.asked(step) else "a signal to another rank"
        cause = own if self._signal is None else self._signal.name
        return Stopped(step, cause)

    def __enter__(self) -> Self:
        self._handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
            received, self._sent = socket.socketpair()
            self._sent.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._handle)
            threading.Thread(target=self._watch, args=[received], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup)
            self._sent.close()  # the thread ends

    def _watch(self, received: socket.socket) -> None:
        first: float | None = None  # when the first signal came
        with received:
            while data := received.recv(1):
                if data[0] not in SIGNALS:  # such as SIGCHLD
                    continue
                if data[0] == signal.SIGHUP:
                    self._drop_terminals()
                if first is None:
                    first = time.monotonic()
                    self._record(data[0])
                elif data[0] != signal.SIGHUP and time.monotonic() - first > SAME_S:
                    if os.isatty(1):
                        os.write(1, SHOW_CURSOR)  # the progress bar has hidden it
                    os._exit(128 + data[0])

    def _record(self, number: int) -> None:
        self._signal = self._signal or signal.Signals(number)

    def _drop_terminals(self) -> None:
        for descriptor in self._terminals:
            if not os.isatty(descriptor):  # it is closed
                drop_output(descriptor)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self._raise_peer_failure()
        self._record(number)  # the thread may not run before the step is over
        if self._rank == 0 and not self._printed:
            self._printed = True  # a stream of Python may be in use by the code that the signal interrupts
            name = signal.Signals(number).name
            text = f"\n{name}: the trainer finishes the step, saves, stops; a second signal kills it\n"
            with suppress(OSError):  # the terminal may be closed
                os.write(2, text.encode())
