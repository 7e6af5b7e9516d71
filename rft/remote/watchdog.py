"""Ends every rank of a run when one of them fails, dies or no longer answers, and says which one and who waited where.
While they wait long, a line of the log has the rank that they wait for.

The ranks share a store, that of the process group. In it each rank publishes once a second that it lives, where its
main thread is and in which collective it waits; the first error of any rank; and the ranks that are found dead.
"""

import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist

from rft.distributed import PeerError, Wait, World, first_failure
from rft.errors import report_to_torchrun
from rft.waits import Reminder

PACKAGE = Path(__file__).parent.parent
INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
TORCH = Path(torch.__file__).parent
EVERY = 1.0  # seconds between two signs of life
SEARCH = 5.0  # seconds in which a rank that lost a connection looks for the cause
LATE = 5.0  # seconds in which a rank that is in no collective leaves it to the others to publish which rank is late
GRACE = 15.0  # seconds in which a rank may end by itself after another one has failed


class Beat(NamedTuple):
    """The last sign of life of a rank.

    Attributes:
        number: counts the signs; -1 at the end of the block.
        calls, name, work: `count`, `name` and `work` of `Wait`.
        place: of the main thread, or of the thread of `Wait`.
        blocked: this thread is within a function of torch.distributed.
    """

    number: int
    calls: int
    name: str
    work: str
    place: str
    blocked: bool


class Watchdog:
    """Makes the first failure of any rank in the block the failure of all ranks.

    A rank that raises publishes its error. A rank that gives no sign of life for `dead_after_s` has died; the rank
    before it finds that. A rank that waits for a living one for `collective_timeout_s`, in a collective or in work that
    needs all ranks, publishes which rank it waited for. The other ranks then end: with a PeerError where their
    collective fails, and otherwise after 15 seconds, with exit status 1. Without torchrun, or with one rank, the block
    runs as if it were alone. The block may have another one of the same object in it, which then handles its errors.

    Args:
        world: all processes.
        dead_after_s: seconds; larger than any time in which one call may keep the interpreter lock.
        collective_timeout_s: seconds; larger than the longest work of one rank that others wait for.
        redact: removes secrets from the message of an error, which leaves the process.
    """

    def __init__(
        self, world: World, dead_after_s: float, collective_timeout_s: float, redact: Callable[[str], str]
    ) -> None:
        self._world = world
        self._redact = redact
        self._dead_after = dead_after_s
        self._timeout = collective_timeout_s
        self._active = "RANK" in os.environ and world.size > 1
        self._limited: set[dist.ProcessGroup] = set()  # the groups whose timeout is set
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._beats = 0
        self._reminder = Reminder("ranks")
        self._depth = 0  # of the block
        self._leaving = False  # the main thread has seen an error and ends by itself
        self._failure = (0, "the store of the process group, which rank 0 or its torchrun holds, is gone")
        self._main = threading.get_ident()
        if self._active:
            store: Any = dist.distributed_c10d._get_default_store()
            self._store = store.clone()  # a connection of its own

    def __enter__(self) -> Self:
        self._depth += 1
        if self._active and self._depth == 1:
            self._limit_groups()
            self._publish(self._beat())
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._depth -= 1
        if not self._active or self._leaving or (self._depth > 0 and not isinstance(error, Exception)):
            return
        if not isinstance(error, Exception):
            self._end_thread()
            self._publish(Beat(-1, 0, "", "", "", False))
            return
        self._leaving = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the other ranks; this one ends by itself
        place = where(traceback.walk_tb(error.__traceback__))
        own = self._redact(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
        try:
            if lost_connection(error):
                self._search()
            self._failure = first_failure(self._store, json.dumps([self._world.rank, own]))
            self._keep_store()
        except dist.DistError:
            pass  # the failure that the thread has read stands
        self._end_thread()
        rank, text = self._failure
        if rank != self._world.rank and from_collective(error):
            raise PeerError(f"rank {rank} failed first: {text}; rank {self._world.rank} waited in {place}") from None

    def _end_thread(self) -> None:
        self._ended.set()
        self._thread.join()

    def _limit_groups(self) -> None:
        """Sets the timeout of all groups, also of those that the run has made since: of meshes, of checkpoints."""
        for group in set(dist.distributed_c10d._world.pg_map) - self._limited:
            # The watchdog, which can say more, is faster than the timeout of a group.
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._timeout + SEARCH + GRACE), group)
            self._limited.add(group)

    def _beat(self) -> Beat:
        wait, frames = self._world.wait, self._frames()
        self._beats += 1
        return Beat(self._beats, wait.count, wait.name, wait.work, where(frames), blocked(frames))

    def _frames(self) -> list[tuple[FrameType, int]]:
        """The frames of the thread that other ranks wait for."""
        return stack_of(self._world.wait.thread or self._main)

    def _publish(self, beat: Beat) -> None:
        self._store.set(f"rft/beat/{self._world.rank}", json.dumps(beat))

    def _read(self, rank: int) -> Beat | None:
        """The last sign of life of a rank; None before the first."""
        found = self._store.compare_set(f"rft/beat/{rank}", "", "")
        return Beat(*json.loads(found)) if found else None

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world.size) if rank != self._world.rank]

    def _fail(self, rank: int, text: str) -> None:
        first_failure(self._store, json.dumps([rank, text]))

    def _watch(self) -> None:
        """The thread: publishes signs of life, watches the next rank, and ends the process."""
        following = (self._world.rank + 1) % self._world.size
        last, changed, failed = self._read(following), time.monotonic(), 0.0
        try:
            while not self._ended.wait(EVERY):
                now = time.monotonic()
                self._limit_groups()
                self._publish(self._beat())
                beat = self._read(following)
                if beat != last or (beat is not None and beat.number < 0):
                    last, changed = beat, now
                elif now - changed > self._dead_after:
                    self._fail(following, f"it gives no sign of life for {self._dead_after:g} s (faults.dead_after_s)")
                if self._leaving:
                    continue
                self._check_wait(self._world.wait)
                found = first_failure(self._store, "")
                if found[0] >= 0:
                    self._failure, failed = found, failed or now
                    if now - failed > GRACE:
                        self._exit(where(stack_of(self._main)))
        except dist.DistError:
            if not self._ended.wait(GRACE) and not self._leaving:
                self._exit(where(stack_of(self._main)))

    def _check_wait(self, wait: Wait) -> None:
        """Logs that a collective, or work that needs all ranks, takes long; ends the process if it takes too long."""
        waited = time.monotonic() - wait.since
        if not (wait.name or wait.work) or waited < min(self._reminder.after_s, self._timeout):
            return
        frames = self._frames()  # now: the thread leaves the collective when another rank ends
        waits, late = bool(wait.name) or blocked(frames), waited >= self._timeout
        if not waits and waited < self._timeout + LATE:
            return  # this rank may be the one that the others wait for: they log or publish it
        beats = {rank: beat for rank in self._others() if (beat := self._read(rank)) is not None}
        missing = waited_for(wait, beats)
        rank = (missing or self._others())[0]
        named = f"for rank {rank}" + (f", which is at {beats[rank].place}" if rank in beats else "")
        place = f"{where(frames)}{f' during {wait.work}' if wait.work else ''}"
        if not late:
            whom = f" {named}" if missing else ", which all ranks have begun"
            self._say(f"rank {self._world.rank} waits in {place}{whom}", waited, missing)
            return
        text = f"rank {self._world.rank} waited {waited:.0f} s in {place} {named}"
        self._fail(rank, f"{text} (faults.collective_timeout_s={self._timeout:g})")
        self._failure = first_failure(self._store, "")
        self._keep_store()
        self._exit(place)

    def _say(self, what: str, seconds: float, missing: list[int]) -> None:
        """Logs a wait on the first rank that waits."""
        if all(rank in missing for rank in range(self._world.rank)):
            self._reminder.say(what, seconds)
        else:
            self._reminder.postpone()

    def _search(self) -> None:
        """After a lost connection: waits for the error of another rank, or publishes the rank that is dead."""
        first, began = {rank: self._read(rank) for rank in self._others()}, time.monotonic()
        while time.monotonic() - began < SEARCH:
            time.sleep(EVERY / 4)
            if first_failure(self._store, "")[0] >= 0:
                return
        for rank, beat in first.items():
            if beat is not None and beat.number >= 0 and self._read(rank) == beat:
                self._fail(rank, "its process ended without an error message")

    def _keep_store(self) -> None:
        """Rank 0 lives until the others have read the failure, if it holds the store."""
        if self._world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            time.sleep(3 * EVERY)

    def _exit(self, place: str) -> NoReturn:
        """Ends this process, whatever its main thread does; the main thread waited in `place`."""
        (rank, text), own = self._failure, self._world.rank
        waited = f"; rank {own} waited in {place}" if rank != own else ""
        message = f"rank {rank} failed first: {text}{waited}"
        report_to_torchrun(message, late=rank != own)
        sys.stdout.flush()
        sys.stderr.write(f"rank {own}: error: {message}\n")
        sys.stderr.flush()
        os._exit(1)


def waited_for(wait: Wait, beats: Mapping[int, Beat]) -> list[int]:
    """The ranks that a rank waits for.

    Args:
        wait: of the rank that waits.
        beats: of the other ranks. One that is in the collective, or has left it, is not waited for. In work without a
            collective of `World` it is one that is in no collective at all, if there is one.
    """
    own = (wait.count, wait.name, wait.work)
    others = [rank for rank, beat in beats.items() if (beat.calls, beat.name, beat.work) != own]
    if not wait.name:
        return [rank for rank, beat in beats.items() if not beat.blocked] or others
    return [
        rank
        for rank in others
        if beats[rank].calls < wait.count or (beats[rank].calls == wait.count and beats[rank].name)
    ]


def stack_of(thread: int) -> list[tuple[FrameType, int]]:
    """The frames of a thread with their lines, outermost first."""
    return list(traceback.walk_stack(sys._current_frames()[thread]))[::-1]


def where(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The innermost of some frames that is not of an installed package: "Metrics.reduce (rft/metrics.py:126)".

    In a collective of `World` it is the caller, with the collective before it: "`gather` of Metrics.reduce (...)".

    Args:
        frames: with their lines, outermost first.
    """
    call, place = "", "the start of the program"
    for frame, line in frames:
        code = frame.f_code
        file = Path(code.co_filename)
        own = file.is_relative_to(PACKAGE)
        if file == Path(__file__) or not (own or (file.is_absolute() and not any(map(file.is_relative_to, INSTALLED)))):
            continue
        if file == PACKAGE / "distributed.py":
            call = call or f"`{code.co_name}` of "
        else:
            call, place = "", f"{code.co_qualname} ({file.relative_to(PACKAGE.parent) if own else file.name}:{line})"
    return f"{call}{place}"


def blocked(frames: Iterable[tuple[FrameType, int]]) -> bool:
    """Whether the innermost frames, those of torch, are in a function of torch.distributed.

    Args:
        frames: with their lines, outermost first.
    """
    for frame, _ in reversed(list(frames)):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(TORCH / "distributed"):
            return True
        if not file.is_relative_to(TORCH):
            return False
    return False


def causes(error: BaseException) -> Iterable[BaseException]:
    """An error, and those that caused it."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def from_collective(error: BaseException) -> bool:
    """Whether an error, or one that caused it, may be that of a collective."""
    return any(isinstance(cause, PeerError | RuntimeError) for cause in causes(error))


def lost_connection(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is that of a connection to another rank."""
    return any(
        isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and "gloo" in str(cause))
        for cause in causes(error)
    )
