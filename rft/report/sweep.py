"""Compares the runs of a sweep: a table, a page with overlaid curves, and the Hydra callback that writes both.

Hydra imports this file while it composes the config, so it must import nothing slow.
"""

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rft.logger.history import ELAPSED, STDERR, History, duration, headline_names, short, write_atomically
from rft.logger.log import STARTED
from rft.report.chart import COLORS, Curve, draw
from rft.report.page import page
from rft.report.run_page import REPORT

COMPARED = (
    "eval/",
    "reward/",
    "preference/accuracy",
    "preference/margin",
    "loss/",
    "entropy",
    "kl/",
    "length/mean",
    "grad_norm",
    "time/step_s",
)


@dataclass(frozen=True)
class SweepRun:
    """One run of a comparison.

    Args:
        folder: None if the run failed before it had one.
        overrides: the overrides of its command.
        result: the metric that it returned.
        failure: why it failed; empty if it did not.
    """

    folder: Path | None
    overrides: Sequence[str]
    result: float | None = None
    failure: str = ""

    @property
    def history(self) -> History:
        return History.of(self.folder) if self.folder is not None else History([])


def labels(runs: Sequence[SweepRun]) -> list[str]:
    """A label for each run: its overrides without those that all runs share."""
    shared = set.intersection(*(set(run.overrides) for run in runs)) if len(runs) > 1 else set()
    own = [" ".join(o for o in run.overrides if o not in shared) for run in runs]
    return [label or (run.folder.name if run.folder else "defaults") for label, run in zip(own, runs, strict=True)]


def comparison_table(runs: Sequence[SweepRun]) -> Table:
    """A row for each run: its result, and `first → last (best)` of the main metrics."""
    histories = [run.history for run in runs]
    names = _headlines(histories)
    table = Table(title="comparison", title_justify="left", title_style="bold", box=box.SIMPLE)
    table.add_column("run", overflow="fold")
    for column in ("result", *names, "steps", "time"):
        table.add_column(column, justify="right")
    for run, label, history in zip(runs, labels(runs), histories, strict=True):
        if run.failure:
            cells: list[Text | str] = [Text("failed", style="bold red")]
        else:
            cells = [Text(short(run.result), style="bold")]
        cells += [_in_short(history, name) for name in names]
        table.add_row(Text(label), *cells, short(history.last_step), duration(history.elapsed))
    return table


def write_comparison(runs: Sequence[SweepRun], target: Path) -> Path:
    """Writes a page with the overlaid curves of the runs, of failed runs up to the failure."""
    histories = [run.history for run in runs]
    body = [_html_table(runs, histories, target.parent)]
    seen = dict.fromkeys(name for history in histories for name in history.names)
    names = [name for prefix in COMPARED for name in seen if name.startswith(prefix) and not name.endswith(STDERR)]
    cards = []
    for name in names:
        curves = [
            Curve(label, history.points(name), name.startswith("eval/"))
            for label, history in zip(labels(runs), histories, strict=True)
        ]
        if any(history.summary(name) for history in histories):
            cards.append(draw(name, curves))
    body.append(f'<h2>Curves</h2><div class="charts wide">{"".join(cards)}</div>' if cards else "")
    failed = sum(bool(run.failure) for run in runs)
    subtitle = f"{len(runs)} runs" + (f", {failed} of them failed" if failed else "")
    return write_atomically(target, page("Comparison", subtitle, body))


class CompareRuns(Callback):
    """Compares the jobs of a multirun. The page is rewritten after every job, so an interrupted sweep leaves one too.

    The table is printed at the end; after a failed job it is printed after every job, because Hydra then ends the
    multirun with that error and calls no callback. A single run is not compared. Under torchrun only rank 0 writes.
    """

    def __init__(self) -> None:
        self._target: Path | None = None
        self._runs: list[SweepRun] = []
        self._known = 0

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        if os.environ.get("RANK", "0") == "0":
            self._target = _free(Path(config.hydra.sweep.dir), "comparison", ".html")

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._known = len(STARTED)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if self._target is None:
            return
        folder = STARTED[-1] if len(STARTED) > self._known else None
        overrides = job_return.overrides or []
        if job_return.status is JobStatus.COMPLETED:
            result = job_return.return_value
            self._runs.append(SweepRun(folder, overrides, float(result) if isinstance(result, int | float) else None))
        else:
            error = job_return._return_value  # `return_value` would raise it
            self._runs.append(SweepRun(folder, overrides, failure=f"{type(error).__name__}: {error}"))
        write_comparison(self._runs, self._target)
        if any(run.failure for run in self._runs):
            self._show()

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        self._show()

    def _show(self) -> None:
        if self._target is None or not self._runs:
            return
        console = Console()
        console.print(comparison_table(self._runs))
        for run, label in zip(self._runs, labels(self._runs), strict=True):
            if run.failure:
                console.print(Text(f"failed: {label}: {run.failure}", style="red"), soft_wrap=True)
        line = Text.assemble(("comparison ", "dim"), (str(self._target), f"link {self._target.resolve().as_uri()}"))
        console.print(line, soft_wrap=True)


def _headlines(histories: Sequence[History]) -> list[str]:
    return list(dict.fromkeys(name for history in histories for name in headline_names(history.names)))


def _in_short(history: History, name: str) -> str:
    found = history.summary(name)
    if found is None:
        return short(None)
    return f"{short(found.first)} → {short(found.last)} ({short(found.best)})"


def _html_table(runs: Sequence[SweepRun], histories: Sequence[History], beside: Path) -> str:
    names = _headlines(histories)
    wide = "".join(f'<th class="n" colspan="3">{html.escape(name)}</th>' for name in names)
    narrow = '<th class="n">first</th><th class="n">best</th><th class="n">last</th>' * len(names)
    rows = []
    for index, (run, label, history) in enumerate(zip(runs, labels(runs), histories, strict=True)):
        text = html.escape(label)
        if run.folder is not None and (run.folder / REPORT).exists():
            text = f'<a href="{html.escape(os.path.relpath(run.folder / REPORT, beside))}">{text}</a>'
        if run.failure:
            text += f'<small class="failed">{html.escape(run.failure)}</small>'
        result = '<span class="failed">failed</span>' if run.failure else short(run.result)
        cells = [f'<td><em class="k{index % COLORS}"></em>{text}</td><td class="n">{result}</td>']
        for name in names:
            found = history.summary(name)
            values = (found.first, found.best, found.last) if found else (None, None, None)
            cells += [f'<td class="n">{short(value)}</td>' for value in values]
        time = duration(history.elapsed) if ELAPSED in history.names else short(None)
        cells.append(f'<td class="n">{history.last_step}</td><td class="n">{time}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    head = f'<tr><th></th><th class="n">result</th>{wide}<th class="n">steps</th><th class="n">time</th></tr>'
    second = f"<tr><th></th><th></th>{narrow}<th></th><th></th></tr>"
    return f'<h2>Runs</h2><div class="card scroll"><table>{head}{second}{"".join(rows)}</table></div>'


def _free(folder: Path, stem: str, ending: str) -> Path:
    """The first of `stem`, `stem-2`, `stem-3`, ... that does not exist."""
    path, number = folder / f"{stem}{ending}", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}{ending}"
    return path
