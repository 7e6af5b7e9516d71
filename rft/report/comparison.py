"""Compares the runs of a sweep: a table, and a page with overlaid curves."""

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rft.logger.console import shown_metrics, titled_table
from rft.logger.history import ELAPSED, History, duration, headline_names, short, write_atomically
from rft.redaction import redact
from rft.report.chart import COLORS, Curve, draw
from rft.report.page import page
from rft.report.run_page import REPORT
from rft.report.seeds import last_common_step, mean_curve, mean_std, paired_difference
from rft.sanitize import printable

SEED = "seed="


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
        return History.of(self.folder) if self.folder is not None else History()

    @property
    def seed(self) -> str:
        """The value of its override `seed=`; empty without one."""
        return next((text.removeprefix(SEED) for text in self.overrides if text.startswith(SEED)), "")


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ in the seed alone; a failed run is a group of its own."""

    label: str
    runs: Sequence[SweepRun]
    histories: Sequence[History]

    @property
    def results(self) -> dict[str, float]:
        """The results by seed."""
        return {run.seed: run.result for run in self.runs if run.result is not None}


def seed_groups(runs: Sequence[SweepRun]) -> list[SeedGroup]:
    """Groups the runs in the order of their first members."""
    grouped: dict[tuple[str, ...], list[int]] = {}
    for index, run in enumerate(runs):
        own = [str(index)] if run.failure or not run.seed else []
        grouped.setdefault((*(text for text in run.overrides if not text.startswith(SEED)), *own), []).append(index)
    single, groups = labels(runs), []
    whole = labels([SweepRun(None, [text for text in run.overrides if not text.startswith(SEED)]) for run in runs])
    for members in grouped.values():
        label = whole[members[0]] if len(members) > 1 else single[members[0]]
        groups.append(SeedGroup(label, [runs[i] for i in members], [runs[i].history for i in members]))
    return groups


def labels(runs: Sequence[SweepRun]) -> list[str]:
    """A label for each run: its overrides without those that all runs share."""
    shared = set.intersection(*(set(run.overrides) for run in runs)) if len(runs) > 1 else set()
    own = [" ".join(o for o in run.overrides if o not in shared) for run in runs]
    return [label or (run.folder.name if run.folder else "defaults") for label, run in zip(own, runs, strict=True)]


def comparison_table(runs: Sequence[SweepRun]) -> Table:
    """A row for each group of seeds: number of runs, result, difference to the first group, main metrics."""
    groups = seed_groups(runs)
    names = _headlines([history for group in groups for history in group.histories])
    table = titled_table("comparison", ["run"], ["n", "result", "difference", *names, "steps", "time"])
    for group in groups:
        failed = any(run.failure for run in group.runs)
        result = Text("failed", "bold red") if failed else Text(_spread(list(group.results.values())), "bold")
        cells: list[Text | str] = [str(len(group.runs)), result]
        cells += [_difference(groups[0], group), *(_in_short(group.histories, name) for name in names)]
        steps, time = max(h.last_step for h in group.histories), sum(h.elapsed for h in group.histories)
        table.add_row(Text(group.label), *cells, short(steps), duration(time))
    return table


def write_comparison(runs: Sequence[SweepRun], target: Path) -> Path:
    """Writes a page with a curve for each group of seeds, of failed runs up to the failure."""
    groups = seed_groups(runs)
    body = [_html_table(groups, target.parent)]
    begin = _first_shown(groups)
    histories = [history for group in groups for history in group.histories]
    seen = dict.fromkeys(name for history in histories for name in history.names)
    cards = []
    for name in shown_metrics(seen):
        curves = [_curve(group, name, begin) for group in groups]
        # a metric of the common steps alone has no curve
        if any(value is not None and (step > begin or not begin) for curve in curves for step, value in curve.points):
            cards.append(draw(name, curves))
    if cards:
        body.append(f'<h2>Curves</h2><div class="charts wide">{"".join(cards)}</div>')
        several = any(len(group.runs) > 1 for group in groups)
        band = "A curve of several seeds is their mean, its band one standard deviation. " if several else ""
        skipped = f"All runs of a seed are equal up to step {begin}; the curves begin there." if begin else ""
        body.append(f'<p class="note">{band}{skipped}</p>' if band or skipped else "")
    failed = sum(bool(run.failure) for run in runs)
    subtitle = f"{len(runs)} runs" + (f", {failed} of them failed" if failed else "")
    return write_atomically(target, page("Comparison", subtitle, body))


class Comparison:
    """The runs of a multirun, and the page that compares them.

    Args:
        folder: where the page is written.
    """

    def __init__(self, folder: Path) -> None:
        self._target = _free_page(folder)
        self._runs: list[SweepRun] = []

    def add(self, folder: Path | None, job: JobReturn) -> None:
        """Adds a job that has ended, and writes the page; prints the table if a job has failed.

        Args:
            folder: of its run; None if it failed before it had one.
        """
        overrides = job.overrides or []
        if job.status is JobStatus.COMPLETED:
            result = job.return_value
            self._runs.append(SweepRun(folder, overrides, float(result) if isinstance(result, int | float) else None))
        else:
            error = job._return_value  # `return_value` would raise it
            self._runs.append(SweepRun(folder, overrides, failure=redact(f"{type(error).__name__}: {error}")))
        write_comparison(self._runs, self._target)
        if any(run.failure for run in self._runs):
            self.show()

    def show(self) -> None:
        """Prints the table, and where the page is."""
        if not self._runs:
            return
        console = Console(markup=False)
        console.print(comparison_table(self._runs))
        for run, label in zip(self._runs, labels(self._runs), strict=True):
            if run.failure:
                console.print(Text(printable(f"failed: {label}: {run.failure}"), style="red"), soft_wrap=True)
        line = Text.assemble(("comparison ", "dim"), (str(self._target), f"link {self._target.resolve().as_uri()}"))
        console.print(line, soft_wrap=True)


def _headlines(histories: Sequence[History]) -> list[str]:
    return list(dict.fromkeys(name for history in histories for name in headline_names(history.names)))


def _first_shown(groups: Sequence[SeedGroup]) -> int:
    """The last step up to which the groups are equal, seed by seed: curves begin there."""
    by_seed: dict[str, list[History]] = {}
    for group in groups:
        for run, history in zip(group.runs, group.histories, strict=True):
            if history.steps:
                by_seed.setdefault(run.seed, []).append(history)
    common = [last_common_step(histories) for histories in by_seed.values() if len(histories) > 1]
    return min((step or 0 for step in common), default=0)


def _curve(group: SeedGroup, name: str, begin: int) -> Curve:
    points, deviations = mean_curve(group.histories, name)
    shown = [(point, deviation) for point, deviation in zip(points, deviations, strict=True) if point[0] >= begin]
    band = [deviation for _, deviation in shown] if len(group.runs) > 1 else ()
    return Curve(group.label, [point for point, _ in shown], name.startswith("eval/"), band=band)


def _spread(values: Sequence[float]) -> str:
    """`mean ± standard deviation`, or the only value."""
    if not values:
        return short(None)
    mean, deviation = mean_std(values)
    return f"{short(mean)} ± {short(deviation, 2)}" if len(values) > 1 else short(mean)


def _difference(baseline: SeedGroup, group: SeedGroup) -> str:
    """`mean ± interval` of the paired differences to the first group."""
    difference = None if group is baseline else paired_difference(baseline.results, group.results)
    if difference is None:
        return short(None)
    mean, half, _ = difference
    return f"{mean:+.4g}" + (f" ± {short(half, 2)}" if half is not None else "")


def _in_short(histories: Sequence[History], name: str) -> str:
    summaries = [summary for history in histories if (summary := history.summary(name)) is not None]
    if not summaries:
        return short(None)
    if len(histories) > 1:
        return f"{_spread([each.first for each in summaries])} → {_spread([each.last for each in summaries])}"
    return f"{short(summaries[0].first)} → {short(summaries[0].last)} ({short(summaries[0].best)})"


def _html_table(groups: Sequence[SeedGroup], beside: Path) -> str:
    names = _headlines([history for group in groups for history in group.histories])
    wide = "".join(f'<th class="n" colspan="3">{html.escape(name)}</th>' for name in names)
    narrow = '<th class="n">first</th><th class="n">best</th><th class="n">last</th>' * len(names)
    rows = []
    for index, group in enumerate(groups):
        text = html.escape(group.label)
        links = [_link(run, f"seed={run.seed}" if run.seed else "report", beside) for run in group.runs]
        if len(group.runs) > 1:
            text += f"<small>{' '.join(links)}</small>"
        else:
            text = _link(group.runs[0], group.label, beside)
        failure = group.runs[0].failure
        if failure:
            text += f'<small class="failed">{html.escape(failure)}</small>'
        result = '<span class="failed">failed</span>' if failure else _stacked(_spread(list(group.results.values())))
        cells = [f'<td><em class="k{index % COLORS}"></em>{text}</td><td class="n">{len(group.runs)}</td>']
        cells += [f'<td class="n">{result}</td><td class="n">{_stacked(_difference(groups[0], group))}</td>']
        for name in names:
            summaries = [summary for history in group.histories if (summary := history.summary(name)) is not None]
            best = [summary.best for summary in summaries if summary.best is not None]
            for values in ([s.first for s in summaries], best, [s.last for s in summaries]):
                cells.append(f'<td class="n">{_stacked(_spread(values))}</td>')
        elapsed = [history.elapsed for history in group.histories if ELAPSED in history.names]
        time = duration(sum(elapsed)) if elapsed else short(None)
        cells.append(f'<td class="n">{max(h.last_step for h in group.histories)}</td><td class="n">{time}</td>')
        rows.append(f"<tr>{''.join(cells)}</tr>")
    columns = '<th class="n">n</th><th class="n">result</th><th class="n">difference</th>'
    head = f'<tr><th></th>{columns}{wide}<th class="n">steps</th><th class="n">time</th></tr>'
    second = f"<tr><th></th><th></th><th></th><th></th>{narrow}<th></th><th></th></tr>"
    note = (
        "Several seeds: mean ± standard deviation, and the sum of the times. The difference is that of the result to "
        "the first row over runs of the same seed: mean ± 95 % t interval."
    )
    table = f'<div class="card scroll"><table>{head}{second}{"".join(rows)}</table></div>'
    return f'<h2>Runs</h2>{table}<p class="note">{note}</p>'


def _stacked(text: str) -> str:
    """The deviation below the mean, so that the table is narrow."""
    mean, sign, deviation = text.partition(" ±")
    return f"{mean}<small>±{deviation}</small>" if sign else mean


def _link(run: SweepRun, text: str, beside: Path) -> str:
    """The text, linked to the run's report if there is one."""
    if run.folder is None or not (run.folder / REPORT).exists():
        return html.escape(text)
    return f'<a href="{html.escape(os.path.relpath(run.folder / REPORT, beside))}">{html.escape(text)}</a>'


def _free_page(folder: Path) -> Path:
    """The first of `comparison.html`, `comparison-2.html`, `comparison-3.html`, ... that does not exist."""
    path, number = folder / "comparison.html", 1
    while path.exists():
        number += 1
        path = folder / f"comparison-{number}.html"
    return path
