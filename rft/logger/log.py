"""The log of a run: one `log(step, stage, numbers)` for the run folder, the console and the sinks.

Steps are counted over all stages: if the warm-up takes steps 1 to 100, training begins with step 101. Step 0 holds the
evaluation before the first step. Rank 0 has a `RunLog`; the other ranks have a `SilentLog`.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rft.errors import Stopped, surviving
from rft.logger.console import RunConsole, shown_metrics
from rft.logger.disk import Records, make_folder, replacing, sync
from rft.logger.history import (
    ELAPSED,
    METRICS,
    METRICS_KEYS,
    STEP_KEY,
    TRAJECTORIES,
    WARNINGS,
    WORST_TOKENS,
    History,
    damage,
    parsed_lines,
    read_lines,
    trajectory_files,
)
from rft.logger.media import MediaFile, media_files
from rft.redaction import redact
from rft.sanitize import printable
from rft.waits import waiting

Store = Callable[[Mapping[str, Any], Path, Path], dict[str, Any]]  # a row, the run folder, that of the file

REPORT_EVERY = 60.0  # seconds; during a run the report is rewritten after an evaluation, at most this often
STARTED: list[Path] = []  # the run folders that this process opened, in order; a sweep reads it


class Sink(Protocol):
    """Receives numbers besides the run folder; selected with `logger=...`."""

    def check(self) -> None:
        """Raises a ValueError if a package is missing; called before a model is loaded."""

    def open(self, run: Path, config: dict[str, Any]) -> None:
        """Starts a new record, or continues the record of the same run folder."""

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None: ...

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receives the lines that `trajectories/` gets; see `RunLog.samples` and `rft.logger.media`."""

    def rewind(self, step: int) -> None:
        """Drops numbers after the step, if the backend can."""

    def close(self, failed: bool) -> None: ...


@dataclass(frozen=True)
class Report:
    """A page about a run, written from its folder during and after the run.

    Attributes:
        write: writes the page about a run folder and its history into the folder, and returns the path of the page.
        conclusions: lines that the console prints below the final table.
    """

    write: Callable[[Path, History], Path]
    conclusions: Callable[[History], Sequence[str]]


class RunLog:
    """Writes `metrics.jsonl`, `worst_tokens.jsonl` and `trajectories/`; passes numbers to the console and the sinks.

    What the disk does not take waits in memory; see `Records`. A report, a sink or a table that fails is one warning.
    As a context manager it closes itself; after an exception it marks the run as failed.

    Args:
        run: the run folder; created if it does not exist.
        config: the resolved config, for the sinks.
        sinks: further receivers; their `check` has passed.
        console: the terminal; by default a new one on stdout.
        report: the page that is rewritten during the run and at its end; by default none.
        store: writes the media of a row of sampled texts into the run folder, and returns a row that names them by
            paths relative to the folder of its file; by default rows have no media.
    """

    def __init__(
        self,
        run: Path,
        config: dict[str, Any],
        sinks: Sequence[Sink] = (),
        console: RunConsole | None = None,
        report: Report | None = None,
        store: Store | None = None,
    ) -> None:
        self.run = run
        self.console = console or RunConsole()
        self._sinks = sinks
        self._report = report
        self._store = store
        make_folder(run)
        STARTED.append(run)
        (run / METRICS).touch()
        sync(run)
        self._records = Records(self.warning)
        self._failed: set[str] = set()  # what has failed, of which there was a warning
        self._began = time.perf_counter()
        self._reported = self._began
        self._known: History | None = None  # of the folder, from the first time that it is needed
        self._closed = False
        for sink in sinks:
            with waiting(f"the run waits for {_name(sink)}, which opens its record"):
                sink.open(run, config)

    def rewind(self, step: int) -> None:
        """Drops everything that an interrupted run wrote after the step from which it resumes (-1 drops all)."""
        kept = History()
        if self._rewrite(METRICS, METRICS_KEYS, step, kept.add):
            known = f"the lines after step {step}" if step >= 0 else "without a checkpoint all lines"
            self.message(f"{METRICS}: {known} are dropped, and these steps run again")
        if kept.steps and kept.steps[-1] < step:
            self.warning(f"{METRICS} has no lines of steps {kept.steps[-1] + 1} to {step}; nothing else is missing")
        elif step > 0 and not kept.steps:
            self.message(f"{METRICS} begins after step {step}, from which the run continues")
        self._known = kept
        self._drop_samples(step)
        if (self.run / WORST_TOKENS).exists():
            self._rewrite(WORST_TOKENS, STEP_KEY, step)
        self._began = time.perf_counter() - kept.elapsed
        self.console.recall(kept)
        for sink in self._sinks:
            sink.rewind(step)

    def _rewrite(
        self, name: str, keys: Mapping[str, type], step: int, keep: Callable[[dict[str, Any]], None] | None = None
    ) -> bool:
        """Drops the lines of a file after a step, and damaged ones, of which a copy stays that a warning names.

        Args:
            keys: see `parsed_lines`.
            keep: is called with each object that stays.

        Returns:
            Whether lines after the step were dropped.
        """
        path, damaged, dropped = self.run / name, list[int](), False
        with replacing(path) as partial:
            with partial.open("w", encoding="utf-8") as file:
                for line, row in parsed_lines(path, keys, damaged):
                    if row["step"] > step:
                        dropped = True
                        continue
                    file.write(line.rstrip("\n") + "\n")
                    if keep is not None:
                        keep(row)
            if damaged:
                shutil.copyfile(path, path.with_name(f"{name}.damaged"))
        if damaged:
            self.warning(f"{name}: {damage(damaged)} left out; {name}.damaged is the file as it was")
        return dropped

    def _history(self) -> History:
        """What the run has logged, also before this process. The file is read once."""
        if self._known is None:
            self._known = History.of(self.run)
        return self._known

    def _drop_samples(self, step: int) -> None:
        """Removes the sampled texts after a step, and their media that no other lines in the run folder name."""
        dropped = [path for written, path in trajectory_files(self.run) if written > step]
        unnamed = self._named_media(dropped)
        for path in dropped:
            path.unlink()
        if unnamed:  # else a run of text would read all its lines
            unnamed -= self._named_media([*self.run.glob("*.jsonl"), *(path for _, path in trajectory_files(self.run))])
        for file in unnamed:
            file.path.unlink(missing_ok=True)

    def _named_media(self, paths: Iterable[Path]) -> set[MediaFile]:
        """The files of media that the lines of jsonl files name."""
        return {file for path in paths for file in media_files(list(read_lines(path)), self.run)}

    def stage(self, name: str, start: int, steps: int, done: int = 0) -> AbstractContextManager[None]:
        """A progress bar for the `steps` steps after step `start`; an earlier process took `done` of them."""
        return self.console.stage(name, start, steps, done)

    def progress(self, name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A progress bar for long work inside a step; call the yielded function with the number of items done."""
        return self.console.progress(name, total)

    def message(self, text: str) -> None:
        """Prints a line on the console."""
        self.console.message(redact(text))

    def warning(self, text: str) -> None:
        """Prints a line in red, and adds it to the file from which the report takes it."""
        text = printable(redact(text))
        self.console.warning(text)
        self._records.append(self.run / WARNINGS, f"{text}\n")

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        """Logs the numbers of a step; adds `time/elapsed_s`, the seconds since the run began.

        JSON has no NaN and no infinity: `metrics.jsonl` holds null instead. Console and sinks receive the values
        unchanged.
        """
        plain = {name: float(value) for name, value in numbers.items()}
        plain[ELAPSED] = round(time.perf_counter() - self._began, 3)
        finite = {name: value if math.isfinite(value) else None for name, value in plain.items()}
        row = {"step": step, "stage": stage, **finite}
        self._records.append(self.run / METRICS, json.dumps(row) + "\n")
        if self._known is not None:
            self._known.add(row)
        self.console.log(step, stage, plain)
        for sink in self._sinks:
            with self._surviving(_name(sink)):
                sink.log(step, stage, plain)
        if any(name.startswith("eval/") for name in plain) and time.perf_counter() - self._reported > REPORT_EVERY:
            self._write_report()
            self._reported = time.perf_counter()

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes sampled texts: rows with `prompt`, `response`, `score` and any other JSON values, and their media."""
        path = self.run / TRAJECTORIES / f"step_{step:08d}.jsonl"
        with self._surviving(f"{TRAJECTORIES}/"):
            if self._store is not None:
                rows = [self._store(row, self.run, path.parent) for row in rows]
            self._records.replace(path, "".join(map(_line, rows)))
            for sink in self._sinks:
                with self._surviving(_name(sink)):
                    sink.samples(step, rows)

    def worst_tokens(self, step: int, tokens: Sequence[Mapping[str, Any]]) -> None:
        """Appends the tokens whose log-probabilities differ most between trainer and engine; no line without tokens."""
        if tokens:
            self._records.append(self.run / WORST_TOKENS, _line({"step": step, "tokens": tokens}))

    def close(self, failure: str = "") -> None:
        """Stops the live display, writes the report and prints the summary. A second call does nothing.

        Args:
            failure: a line that says why the run stopped early; empty if it did not.
        """
        if self._closed:
            return
        self._closed = True
        if problem := self._records.flush():
            self.console.warning(f"{redact(problem)}: the last records of the run are lost")
        for sink in self._sinks:
            with self._surviving(_name(sink)), waiting(f"the run waits for {_name(sink)}, which closes its record"):
                sink.close(bool(failure))
        page = self._write_report()
        history, conclusions = self._history(), list[str]()
        with self._surviving("the conclusions"):
            conclusions += [] if self._report is None else self._report.conclusions(history)
        with self._surviving("the summary"):
            self.console.stop()
            summaries = [found for name in shown_metrics(history.names) if (found := history.summary(name)) is not None]
            self.console.summary(summaries, self.run, page, history.elapsed, redact(failure), conclusions)

    def _write_report(self) -> Path | None:
        """Writes the page of the run and returns its path; None without one, or without the folder."""
        with self._surviving("the report"):
            if self._report is not None and self.run.exists():
                return self._report.write(self.run, self._history())
        return None

    @contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """An error in the block becomes a warning, a second one of the same nothing."""

        def warn(text: str) -> None:
            if what not in self._failed:
                self._failed.add(what)
                self.warning(text)

        with surviving(what, warn):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is KeyboardInterrupt:
            steps = self._history().steps
            self.close(f"interrupted after step {steps[-1] if steps else 0}; run the same command to resume")
        elif kind is Stopped:
            self.message(str(error))
            self.close()
        else:
            self.close("" if kind is None else f"stopped by {kind.__name__}: {error}".rstrip(": "))


class SilentLog(RunLog):
    """The log of every rank but 0: accepts every call and does nothing."""

    def __init__(self) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def stage(self, name: str, start: int, steps: int, done: int = 0) -> AbstractContextManager[None]:
        return nullcontext()

    def progress(self, name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda done: None)

    def message(self, text: str) -> None:
        pass

    def warning(self, text: str) -> None:
        pass

    def log(self, step: int, stage: str, numbers: Mapping[str, float]) -> None:
        pass

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def worst_tokens(self, step: int, tokens: Sequence[Mapping[str, Any]]) -> None:
        pass

    def close(self, failure: str = "") -> None:
        pass


def _name(sink: Sink) -> str:
    return f"the logger {type(sink).__name__}"


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
