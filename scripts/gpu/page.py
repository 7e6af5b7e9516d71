"""The page of a report: counts, a line for every check, charts of the updates, and the profile."""

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rft.logger.history import Point
from rft.report.chart import Curve, draw
from rft.report.page import page

STATUSES = ("passed", "failed", "not installed", "needs a GPU", "not run")
CHARTS = {"tokens_per_s": "tokens per second", "mfu": "MFU", "tflops": "TFLOPS", "memory_gib": "peak memory (GiB)"}


def write_page(out: Path, report: dict[str, Any]) -> None:
    """Writes report.html into the folder."""
    results = report["results"]
    machine = next((result["figure"] for result in results if result["name"] == "machine"), "")
    body = [tiles(results), *charts(results), table(results)]
    for result in results:
        if result["text"]:
            title, text = html.escape(result["title"]), html.escape(result["text"])
            body.append(f'<details class="card"><summary>{title}</summary><pre>{text}</pre></details>')
    (out / "report.html").write_text(page("gpu_check", machine or report["device"], body))


def tiles(results: list[dict[str, Any]]) -> str:
    """How many checks have each status."""
    counts = {status: sum(result["status"] == status for result in results) for status in STATUSES}
    shown = "".join(
        f'<div class="card tile"><small>{status}</small><strong>{count}</strong></div>'
        for status, count in counts.items()
        if count
    )
    return f'<div class="tiles">{shown}</div>'


def charts(results: list[dict[str, Any]]) -> Iterator[str]:
    """Speed and memory by the length of rows, a curve for each kind of update."""
    curves: dict[str, dict[str, list[Point]]] = {name: {} for name in CHARTS}
    for result in results:
        numbers = result["numbers"]
        for name in CHARTS:
            if "length" in numbers and name in numbers:
                kind = curves[name].setdefault(result["name"].split(":")[0], [])
                kind.append((numbers["length"], numbers[name]))
    drawn = [
        draw(f"{CHARTS[name]} by tokens of a row", [Curve(kind, sorted(p), dotted=True) for kind, p in kinds.items()])
        for name, kinds in curves.items()
        if kinds
    ]
    if drawn:
        yield f'<h2>Updates</h2><div class="charts">{"".join(drawn)}</div>'


def table(results: list[dict[str, Any]]) -> str:
    """A line for every check: its status with the figure or the reason."""
    lines = []
    for result in results:
        name, title = html.escape(result["name"]), html.escape(result["title"])
        status = f'<span class="failed">{result["status"]}</span>' if result["status"] == "failed" else result["status"]
        said = html.escape(result["figure"] or result["reason"])
        seconds = f'<td class="n">{result["seconds"]:.0f} s</td>'
        lines.append(f"<tr><td>{name}<small>{title}</small></td><td>{status}<small>{said}</small></td>{seconds}</tr>")
    return f'<h2>Checks</h2><div class="card scroll"><table>{"".join(lines)}</table></div>'
