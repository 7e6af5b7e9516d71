"""`report.html`: one page that shows a run. It is written from the run folder and needs no network."""

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rft.batch.row_fields import EPISODE
from rft.imports import import_part
from rft.logger.history import (
    ELAPSED,
    STDERR,
    WARNINGS,
    History,
    direction,
    duration,
    headline_names,
    read_lines,
    short,
    trajectory_files,
    write_atomically,
)
from rft.logger.log import Report
from rft.logger.media import media_files
from rft.report.chart import Curve, draw
from rft.report.page import LONGEST, cut, page
from rft.report.scaling import scaling_fit

REPORT = "report.html"
FIRST = "Evaluation and reward"
SECTIONS = {  # title: pattern of its charts; the first match counts
    "Episodes": r"episode/.*",
    "Texts": r"length.*|.*, tokens|rollout/.*|staleness/.*",
    "Learning": r"reward/std|loss/.*|preference/.*|kl/.*|entropy|clipped share|grad_norm|lr",
    FIRST: r"eval/.*|reward.*|rows without a score",
    "Time and memory": r"seconds a step|time/.*|throughput/.*|padding/.*|memory/.*",
    "More": r".*",
}
TOGETHER = (  # metrics that share a chart, and the title of the chart
    (r"(eval/.*)/[^/]*length[^/]*", r"\1, tokens"),
    (r"(eval/.*)/[^/]*", r"\1"),
    (r"reward/(.*/)?unscored(/.*)?", "rows without a score"),
    (r"reward/(?!std$)[^/]*", "reward"),
    (r"clip/.*", "clipped share"),
    (r"length/(mean|max|min)", "length in tokens"),
    (r"time/.*_s", "seconds a step"),
)
FILES_SHOWN = 6
ROWS_SHOWN = 6


def write_report(run: Path, history: History | None = None) -> Path:
    """Writes `<run>/report.html` from the current content of the folder, also of a killed run. Returns the path.

    Args:
        history: of the run, if it has been read.
    """
    history = History.of(run) if history is None else history
    scaling = [f'<p class="note">{html.escape(line)}</p>' for line in scaling_fit(history)]
    body = [*_warnings(run), _tiles(history), *scaling, *_charts(history), _table(history)]
    body += [*_samples(run), _config(run)]
    return write_atomically(run / REPORT, page(run.resolve().name, _subtitle(history), body))


RUN_REPORT = Report(write_report, scaling_fit)


def chart_groups(names: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """Assigns metrics to charts: {section: {chart title: metric names}}. Every name appears exactly once."""
    groups: dict[str, dict[str, list[str]]] = {title: {} for title in (FIRST, "Learning", *SECTIONS)}
    for name in names:
        if name == ELAPSED or name.endswith(STDERR):
            continue
        chart = next((re.sub(pattern, title, name) for pattern, title in TOGETHER if re.fullmatch(pattern, name)), name)
        section = next(title for title, charts in SECTIONS.items() if re.fullmatch(charts, chart, re.DOTALL))
        groups[section].setdefault(chart, []).append(name)
    return {section: charts for section, charts in groups.items() if charts}


def _subtitle(history: History) -> str:
    if not history.steps:
        return "no numbers logged yet"
    parts = [f"{history.last_step} steps in {duration(history.elapsed)}"]
    parts += [f"{stage.name} to step {stage.end}" for stage in history.stages() if stage.end > stage.start]
    rate = history.summary("throughput/tokens_per_s")
    return " · ".join([*parts, *([f"{short(rate.last)} tokens/s"] if rate else [])])


def _tiles(history: History) -> str:
    """The main metrics: value at the start, after each stage, and the change over the last stage."""
    tiles = []
    for name in headline_names(history.names):
        marks = history.milestones(name)
        if not marks:
            continue
        (_, before), (_, last) = marks[-2:] if len(marks) > 1 else marks * 2
        change = last - before
        style = "up" if change * direction(name) > 0 else "down" if change * direction(name) < 0 else ""
        arrow = f'<i>{short(before)} →</i> <strong>{short(last)}</strong> <b class="{style}">{change:+.3g}</b>'
        path = " · ".join(f"{html.escape(label)} {short(value)}" for label, value in marks)
        tiles.append(f'<div class="card tile"><small>{html.escape(name)}</small>{arrow}<small>{path}</small></div>')
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _warnings(run: Path) -> Iterator[str]:
    if (run / WARNINGS).exists():
        for line in dict.fromkeys((run / WARNINGS).read_text(errors="replace").splitlines()):
            yield f'<p class="failed">{html.escape(line)}</p>'


def _charts(history: History) -> Iterator[str]:
    stages = history.stages()
    for section, charts in chart_groups([name for name in history.names if history.summary(name)]).items():
        large = " large" if section == FIRST else ""
        cards = [draw(title, [_curve(history, n) for n in names], stages) for title, names in charts.items()]
        yield f'<h2>{section}</h2><div class="charts{large}">{"".join(cards)}</div>'
    if history.steps:
        lines = "Thin lines are single steps, bold lines a moving average. Vertical bars are one standard error."
        yield f'<p class="note">{lines}</p>'


def _curve(history: History, name: str) -> Curve:
    points, errors = history.points(name), dict(history.points(name + STDERR))
    bars = [errors.get(step) for step, _ in points] if errors else ()
    return Curve(name.rpartition("/")[2], points, name.startswith("eval/"), bars)


def _table(history: History) -> str:
    metrics = [found for name in history.names if (found := history.summary(name)) and name != ELAPSED]
    if not metrics:
        return ""
    rows = "".join(
        f'<tr><td>{html.escape(s.name)}</td><td class="n">{short(s.first)}</td>'
        f'<td class="n">{short(s.best)}</td><td class="n">{short(s.last)}</td></tr>'
        for s in metrics
    )
    head = '<tr><th>metric</th><th class="n">first</th><th class="n">best</th><th class="n">last</th></tr>'
    return (
        f'<h2>Numbers</h2><div class="card"><details><summary>All {len(metrics)} metrics</summary>'
        f'<div class="scroll"><table>{head}{rows}</table></div></details></div>'
    )


def _samples(run: Path) -> Iterator[str]:
    """Sampled texts of the first step, the last step and some between."""
    files = _spread(trajectory_files(run), FILES_SHOWN)
    texts = [(step, list(read_lines(path))) for step, path in files]
    scores = [float(row["score"]) for _, rows in texts for row in rows if row.get("score") is not None]
    low, high = min([0.0, *scores]), max([1.0, *scores])
    if texts:
        yield "<h2>Sampled texts</h2>"
    if any(EPISODE in row for _, rows in texts for row in rows):
        yield '<p class="note">A bar marks the turns that the policy wrote; they train, and the others do not.</p>'
    lines, media = [_spread(rows, ROWS_SHOWN) for _, rows in reversed(texts)], None
    if next(media_files(lines, run), None) is not None:
        media = import_part("rft.report.media", "PageMedia", "actor.processor")(run, lines)
        yield media.note
    for index, (step, rows) in enumerate(texts):
        shown = "".join(_sample(row, low, high, media) for row in _spread(rows, ROWS_SHOWN))
        opened = " open" if index in (0, len(texts) - 1) else ""
        here = [float(row["score"]) for row in rows if row.get("score") is not None]
        mean = f", mean score {short(sum(here) / len(here))}" if here else ""
        count = f"{min(len(rows), ROWS_SHOWN)} of {len(rows)} texts{mean}"
        yield (f'<details class="card"{opened}><summary>Step {step} <span>{count}</span></summary>{shown}</details>')


def _sample(row: Mapping[str, Any], low: float, high: float, media: Any) -> str:
    score = row.get("score")
    badge = ""
    if score is not None:
        share = (float(score) - low) / (high - low)
        # red to green, dark enough for white text
        badge = f'<b class="score" style="background: hsl({10 + 130 * share:.0f} 62% 36%)">{short(float(score))}</b>'
    elif "score" in row:
        badge = '<b class="score" style="background: #777">no score</b>'
    facts = {key: value for key, value in row.items() if key not in ("prompt", "response", "score", EPISODE)}
    question, answer = _text(row.get("prompt", ""), media), _text(row.get("response", ""), media)
    if (record := row.get(EPISODE)) is not None:
        drawn = import_part("rft.report.dialogue", "draw_episode", "environment")
        question, answer, numbers = drawn(record)
        facts |= numbers
    line = " · ".join(f"{html.escape(key)} {html.escape(cut(_plain(value), 120))}" for key, value in facts.items())
    return (
        f'<div class="sample"><div class="question"><small>prompt</small>{question}</div>'
        f"<div><small>response</small>{answer}</div>{badge}"
        f'<small class="facts">{line}</small></div>'
    )


def _config(run: Path) -> str:
    path = run / "config.yaml"
    if not path.exists():
        return ""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        key = re.match(r"(\s*(?:- )*)([^\s:#'\"]+)(:)(?=\s|$)", line)
        if line.lstrip().startswith("#"):
            lines.append(f'<span class="remark">{html.escape(line)}</span>')
        elif key:
            rest = html.escape(line[key.end() :])
            lines.append(f'{html.escape(key[1])}<span class="key">{html.escape(key[2])}</span>:{rest}')
        else:
            lines.append(html.escape(line))
    text = "\n".join(lines)
    return (
        f'<h2>Config</h2><div class="card"><details><summary>config.yaml <span>{len(lines)} lines</span></summary>'
        f"<pre>{text}</pre></details></div>"
    )


def _spread(things: Sequence[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spaced, with the first and the last."""
    if len(things) <= most:
        return list(things)
    return [things[round(i * (len(things) - 1) / (most - 1))] for i in range(most)]


def _text(value: Any, media: Any) -> str:
    if media is not None and media.has(value):
        return str(media.messages(value))
    return f'<div class="text">{html.escape(cut(_plain(value), LONGEST))}</div>'


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return short(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
