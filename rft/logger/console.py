"""The console of a run: on a terminal a live table and a progress bar for each stage, in a pipe plain lines."""

import errno
import logging
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOBase
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rft.logger.history import STDERR, History, MetricSummary, duration, short
from rft.sanitize import printable

SHOWN = (
    "eval/",
    "reward/",
    "preference/accuracy",
    "preference/margin",
    "loss/",
    "kl/",
    "entropy",
    "grad_norm",
    "length/mean",
    "time/step_s",
    "throughput/",
)
IN_A_LINE = ("eval/", "reward/mean", "loss/", "kl/ref", "entropy", "length/mean", "time/step_s")
LINES_PER_STAGE = 20  # without a terminal
PROGRESS_EVERY = 30.0  # seconds between two lines about the same long work, without a terminal
TREND = 18  # characters
HISTORY = 2000  # values that a trend covers
BLOCKS = "▁▂▃▄▅▆▇█"
MARKS = {True: ("✓ ", "green"), False: ("✗ ", "bold red"), None: ("• ", "dim")}


@dataclass(frozen=True)
class _StageProgress:
    name: str
    start: int
    steps: int
    task: TaskID
    began: float
    done: int  # steps taken by an earlier process


class Output(TextIOBase):
    """A stream that never fails: without its terminal, the reader of its pipe or space on its disk, text is dropped.

    Args:
        stream: where the text goes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the stream."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Writes a text, or drops it."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Writes what the stream holds back, or drops it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The file descriptor of the stream."""
        return self._stream.fileno()

    def _drop(self, error: OSError) -> None:
        if error.errno in (errno.EPIPE, errno.EIO):
            drop_output(self._stream.fileno())


def drop_output(descriptor: int) -> None:
    """Lets a file descriptor, whose terminal is closed or whose pipe has no reader, lead to nowhere, for good."""
    with open(os.devnull, "w") as nowhere, suppress(OSError):
        os.dup2(nowhere.fileno(), descriptor)


class RunConsole:
    """Shows one run.

    Args:
        console: the output; by default stdout.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=cast(TextIO, Output(sys.stdout)), markup=False)
        self._values: dict[str, deque[float]] = {}
        self._stage: _StageProgress | None = None
        self._live: Live | None = None
        self._diverted: list[tuple[logging.StreamHandler, object]] = []
        self._bars = Progress(
            TextColumn("{task.description:<12}", style="bold", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]eta"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
            speed_estimate_period=1800.0,  # steps may take minutes
        )

    @property
    def is_live(self) -> bool:
        """Whether the output can be redrawn: False in a pipe, a file or a CI log."""
        return self.console.is_terminal and not self.console.is_dumb_terminal

    @contextmanager
    def stage(self, name: str, start: int, steps: int, done: int = 0) -> Iterator[None]:
        """A bar for the `steps` steps after step `start`; an earlier process took `done` of them."""
        self._begin()
        task = self._bars.add_task(name, total=steps, completed=done)
        self._stage = _StageProgress(name, start, steps, task, time.monotonic(), done)
        try:
            yield
        finally:
            self._bars.stop_task(task)
            self._stage = None

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar for long work inside a step; it is removed when the work is done."""
        self._begin()
        task = self._bars.add_task(f"  {name}", total=total)
        printed = time.monotonic()

        def show(done: int) -> None:
            nonlocal printed
            self._bars.update(task, completed=done)
            if not self.is_live and time.monotonic() - printed > PROGRESS_EVERY:
                printed = time.monotonic()
                self.message(f"  {name} {done}/{total}")

        try:
            yield show
        finally:
            self._bars.remove_task(task)

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        """Moves the bar of the stage to the step and redraws the table; without a terminal, prints a line."""
        for name, value in numbers.items():
            self._remember(name, [value])
        current = self._stage if self._stage is not None and self._stage.name == stage else None
        if current is not None:
            self._bars.update(current.task, completed=step - current.start)
        if self._live is not None:
            self._live.update(Group(self._bars, self._table()))
        elif not self.is_live and self._is_due(step, current, numbers):
            self.console.print(Text(self._line(step, stage, current, numbers)), soft_wrap=True)

    def recall(self, history: History) -> None:
        """Restores the values that an earlier process logged, so that trends cover the whole run."""
        self._values.clear()
        for name in shown_metrics(history.names):
            self._remember(name, history.values(name))

    def message(self, text: str) -> None:
        """A line above the live display."""
        self.console.print(Text(printable(text)), soft_wrap=True)

    def warning(self, text: str) -> None:
        """A red line above the live display."""
        self.console.print(Text(printable(text), style="bold red"), soft_wrap=True)

    def stop(self) -> None:
        """Stops the live display, leaves its last state on the screen and restores the log handlers."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        for handler, stream in self._diverted:
            handler.setStream(stream)
        self._diverted = []

    def summary(
        self,
        metrics: Sequence[MetricSummary],
        run: Path,
        report: Path | None,
        seconds: float,
        failure: str = "",
        conclusions: Sequence[str] = (),
    ) -> None:
        """Prints the end of a run: first, best and last value of each metric, conclusions, and the paths.

        Args:
            metrics: a row of the table each.
            run: the run folder.
            report: the page of the run; None if there is none.
            seconds: duration of the run.
            failure: a line that says why the run stopped early; empty if it did not.
            conclusions: lines below the table.
        """
        title = Text(f"{run.name}, {duration(seconds)}")
        table = titled_table(title, ["metric"], ["first", "best", "last"])
        for metric in metrics:
            style = "bold" if metric.name.startswith("eval/") else ""
            table.add_row(Text(metric.name), short(metric.first), short(metric.best), short(metric.last), style=style)
        if metrics:
            self.console.print(table)
        for line in conclusions:
            self.message(line)
        if failure:
            self.warning(failure)
        for label, path in (("run folder", run), ("report", report)):
            if path is not None:
                link = Text.assemble((f"{label:<11}", "dim"), (str(path), f"link {path.resolve().as_uri()}"))
                self.console.print(link, soft_wrap=True)

    def _begin(self) -> None:
        if not self.is_live or self._live is not None:
            return
        before = {sys.stdout, sys.stderr}
        self._live = Live(self._bars, console=self.console, refresh_per_second=4)
        self._live.start()
        # log handlers hold the old streams and would write into the display; Live's own streams write above it
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        for handler in (h for logger in loggers if isinstance(logger, logging.Logger) for h in logger.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                self._diverted.append((handler, handler.stream))
                handler.setStream(sys.stderr)

    def _remember(self, name: str, values: Sequence[float]) -> None:
        if shown_metrics([name]):
            self._values.setdefault(name, deque(maxlen=HISTORY)).extend(values)

    def _table(self) -> Table:
        """The most important metrics, as many as fit the height, in two columns if the width allows."""
        sides = 2 if self.console.width >= 116 else 1
        room = max(3, self.console.height - len(self._bars.tasks) - 4)
        names = shown_metrics(self._values)[: room * sides]
        rows: list[tuple[Text | str, ...]] = [
            (
                Text(name, style="bold green" if name.startswith("eval/") else ""),
                short(self._values[name][-1], 3),
                Text(trend(self._values[name]), style="cyan"),
            )
            for name in names
        ]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for _ in range(sides):
            table.add_column("metric", no_wrap=True)
            table.add_column("last", justify="right", min_width=9)
            table.add_column("trend", no_wrap=True, min_width=TREND)
        height = math.ceil(len(rows) / sides)
        halves = [rows[side * height : (side + 1) * height] for side in range(sides)]
        for cells in zip_longest(*halves, fillvalue=("", "", "")):
            table.add_row(*(cell for side in cells for cell in side))
        return table

    def _is_due(self, step: int, current: _StageProgress | None, numbers: Mapping[str, float]) -> bool:
        if current is None or any(name.startswith("eval/") for name in numbers):
            return True
        done = step - current.start
        return done == current.steps or done % max(1, math.ceil(current.steps / LINES_PER_STAGE)) == 0

    def _line(self, step: int, stage: str, current: _StageProgress | None, numbers: Mapping[str, float]) -> str:
        """`train 40/200  reward/mean 0.41  loss/policy 0.02  0:01:12  eta 0:04:40`."""
        done = 0 if current is None else step - current.start
        parts = [f"{stage} step {step}" if current is None else f"{stage} {done}/{current.steps}"]
        parts += [f"{name} {short(numbers[name], 3)}" for name in shown_metrics(numbers, IN_A_LINE)]
        if current is not None and done > current.done:
            spent = time.monotonic() - current.began
            left = spent / (done - current.done) * (current.steps - done)
            parts.append(f"eta {duration(left)}" if left else f"took {duration(spent)}")
        return "  ".join(parts)


def titled_table(title: str | Text, left: Sequence[str] = (), right: Sequence[str] = (), **options: Any) -> Table:
    """A table as the modes print it.

    Args:
        left: names of the first columns, of texts.
        right: names of the columns behind them, of numbers.
        options: further ones of the table.
    """
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE, **options)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def verdict(holds: bool | None, text: str | Text) -> Text:
    """A line with a mark for what holds, does not hold, or is only stated (None)."""
    return Text.assemble(MARKS[holds], text)


@contextmanager
def work_progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for long work before a run has its folder; rank 0 alone shows it. See `RunConsole.progress`."""
    console = RunConsole(Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0"))
    try:
        with console.progress(name, total) as show:
            yield show
    finally:
        console.stop()


def shown_metrics(names: Iterable[str], prefixes: Sequence[str] = SHOWN) -> list[str]:
    """The names that begin with one of the prefixes, in the order of the prefixes, without standard errors."""
    return [n for prefix in prefixes for n in names if n.startswith(prefix) and not n.endswith(STDERR)]


def trend(values: Sequence[float] | deque[float]) -> str:
    """A line of block characters, oldest value left; the height of a block is the mean of its part of the values.

    NaN and infinity are skipped. A single value has no trend.
    """
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    width = min(TREND, len(finite))
    edges = [round(i * len(finite) / width) for i in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return BLOCKS[0] * width
    return "".join(BLOCKS[round((mean - low) / (high - low) * (len(BLOCKS) - 1))] for mean in means)
