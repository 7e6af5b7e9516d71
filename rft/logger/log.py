"""One `log(step, stage, numbers)` for a run, and everything that listens to it.

Steps are counted once over all stages of a run: if the warm-up takes steps 1 to 100, training begins with step 101.
Step 0 is before anything and holds evaluations only. Only rank zero has a `RunLog`; the other ranks hold a `SilentLog`.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rft.logger.console import RunConsole, shown_metrics
from rft.report.history import (
    ELAPSED,
    METRICS,
    TRAJECTORIES,
    WORST_TOKENS,
    History,
    read_lines,
    trajectory_files,
    write_atomically,
)
from rft.report.run_page import write_report
from rft.report.scaling import scaling_fit

REPORT_EVERY = 60.0  # seconds; the report of a run that goes on is renewed after an evaluation, at most this often
STARTED: list[Path] = []  # the folders of the runs that this process began, in order: a sweep looks here


class Sink(Protocol):
    """A place for numbers besides the run folder, chosen with `logger=...`."""

    def check(self) -> None:
        """Raises a ValueError, before anything is loaded, where a package is missing."""

    def open(self, run: Path, config: dict[str, Any]) -> None:
        """Begins, or continues what the same run folder began earlier."""

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Forgets what lies after the step, as far as the place allows it."""

    def close(self, failed: bool) -> None: ...


class RunLog:
    """Writes `metrics.jsonl`, `worst_tokens.jsonl`, `trajectories/` and `report.html`, and tells console and sinks.

    As a context manager it closes itself, and marks the run as failed where an exception passes through.

    Args:
        run: the run folder; it is made where it does not exist.
        config: the resolved config, for the sinks.
        sinks: further places, checked already.
        console: the terminal; a new one on stdout where none is given.
    """

    def __init__(
        self, run: Path, config: dict[str, Any], sinks: Sequence[Sink] = (), console: RunConsole | None = None
    ) -> None:
        self.run = run
        self.console = console or RunConsole()
        self._sinks = sinks
        run.mkdir(parents=True, exist_ok=True)
        STARTED.append(run)
        self._file = (run / METRICS).open("a", encoding="utf-8")
        self._began = time.perf_counter()
        self._reported = self._began
        self._closed = False
        for sink in sinks:
            sink.open(run, config)

    def rewind(self, step: int) -> None:
        """Drops what an interrupted run wrote after the step that it is continued from (-1 drops everything)."""
        kept = [row for row in History.of(self.run).rows if row["step"] <= step]
        self._file.close()
        write_atomically(self.run / METRICS, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = (self.run / METRICS).open("a", encoding="utf-8")
        for written, path in trajectory_files(self.run):
            if written > step:
                path.unlink()
        if (worst := self.run / WORST_TOKENS).exists():
            write_atomically(worst, "".join(_line(row) for row in read_lines(worst) if row["step"] <= step))
        history = History(kept)
        self._began = time.perf_counter() - history.elapsed
        self.console.recall(history)
        for sink in self._sinks:
            sink.rewind(step)

    @contextmanager
    def stage(self, name: str, start: int, steps: int, done: int = 0) -> Iterator[None]:
        """A progress bar for `steps` steps after step `start`, `done` of which an earlier process took."""
        with self.console.stage(name, start, steps, done):
            yield

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for long work inside a step; what it yields is called with the number of things done so far."""
        with self.console.progress(name, total) as show:
            yield show

    def message(self, text: str) -> None:
        """A line for the person at the terminal."""
        self.console.message(text)

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        """Hands the numbers of a step to all who listen; adds `time/elapsed_s`, the seconds since the run began.

        JSON has no NaN and no infinity: `metrics.jsonl` holds null in their place. Console and sinks get them as they
        are.
        """
        plain = {name: float(value) for name, value in numbers.items()}
        plain[ELAPSED] = round(time.perf_counter() - self._began, 3)
        finite = {name: value if math.isfinite(value) else None for name, value in plain.items()}
        self._file.write(json.dumps({"step": step, "stage": stage, **finite}) + "\n")
        self._file.flush()
        self.console.log(step, stage, plain)
        for sink in self._sinks:
            sink.log(step, stage, plain)
        if any(name.startswith("eval/") for name in plain) and time.perf_counter() - self._reported > REPORT_EVERY:
            write_report(self.run)
            self._reported = time.perf_counter()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes sampled texts: rows of `prompt`, `response`, `score` and whatever else JSON can hold."""
        path = self.run / TRAJECTORIES / f"step_{step:08d}.jsonl"
        write_atomically(path, "".join(map(_line, rows)))

    def worst_tokens(self, step: int, tokens: Sequence[Mapping[str, Any]]) -> None:
        """Adds a line with the tokens on which trainer and engine are farthest apart; none where no token has both."""
        if tokens:
            with (self.run / WORST_TOKENS).open("a", encoding="utf-8") as file:
                file.write(_line({"step": step, "tokens": tokens}))

    def close(self, failure: str = "") -> None:
        """Ends the live display, writes the report, prints the summary. A second call does nothing.

        Args:
            failure: why the run stopped early, empty where it did not.
        """
        if self._closed:
            return
        self._closed = True
        self._file.close()
        for sink in self._sinks:
            sink.close(bool(failure))
        report = write_report(self.run)
        history = History.of(self.run)
        stories = [story for name in shown_metrics(history.names) if (story := history.story(name)) is not None]
        self.console.stop()
        self.console.summary(stories, self.run, report, history.elapsed, failure, scaling_fit(history))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if kind is None else f"{kind.__name__}: {error}".rstrip(": "))


class SilentLog(RunLog):
    """The log of every rank but zero: takes everything and does nothing."""

    def __init__(self) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    @contextmanager
    def stage(self, name: str, start: int, steps: int, done: int = 0) -> Iterator[None]:
        yield

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda done: None

    def message(self, text: str) -> None:
        pass

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        pass

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def worst_tokens(self, step: int, tokens: Sequence[Mapping[str, Any]]) -> None:
        pass

    def close(self, failure: str = "") -> None:
        pass


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
