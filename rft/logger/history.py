"""Reads a run folder back: `metrics.jsonl`, `trajectories/`, and summaries of them for console and pages."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rft.errors import listed
from rft.logger.disk import make_folder, replacing

METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories"
WARNINGS = "warnings.txt"
WORST_TOKENS = "worst_tokens.jsonl"
ELAPSED = "time/elapsed_s"
STDERR = "_stderr"  # `eval/test/accuracy_stderr` is the standard error of `eval/test/accuracy`
METRICS_KEYS: Mapping[str, type] = MappingProxyType({"step": int, "stage": str})
STEP_KEY: Mapping[str, type] = MappingProxyType({"step": int})
ANY_KEYS: Mapping[str, type] = MappingProxyType({})
LOWER_IS_BETTER = ("loss", "perplexity")
CANARY = "reward/canary"

Point = tuple[int, float | None]  # step, value; None if the run logged NaN or infinity


@dataclass(frozen=True)
class StageSpan:
    """The steps of one stage: those after `start`, up to and including `end`."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class MetricSummary:
    """First, best and last value of one metric; `best` is None if neither higher nor lower is better."""

    name: str
    first: float
    best: float | None
    last: float


class History:
    """The rows of `metrics.jsonl`, oldest first."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows
        self._points: dict[str, list[Point]] = {}
        for row in rows:
            for name, value in row.items():
                if name not in ("step", "stage"):
                    self._points.setdefault(name, []).append((row["step"], value))

    @classmethod
    def of(cls, run: Path) -> "History":
        """Reads a run folder; without metrics the history is empty."""
        path = run / METRICS
        return cls(read_lines(path, METRICS_KEYS) if path.exists() else [])

    @property
    def names(self) -> list[str]:
        """Every metric, in the order of first appearance."""
        return list(self._points)

    @property
    def last_step(self) -> int:
        return max((row["step"] for row in self.rows), default=0)

    @property
    def elapsed(self) -> float:
        """Seconds from the beginning of the run to the last row, as logged."""
        return max((value for _, value in self.points(ELAPSED) if value is not None), default=0.0)

    def points(self, name: str) -> list[Point]:
        """(step, value) of one metric."""
        return self._points.get(name, [])

    def stages(self) -> list[StageSpan]:
        """The stages in order; each begins where the one before it ended."""
        stages: list[StageSpan] = []
        for row in self.rows:
            if stages and stages[-1].name == row["stage"]:
                stages[-1] = StageSpan(row["stage"], stages[-1].start, max(row["step"], stages[-1].end))
            else:
                before = stages[-1].end if stages else max(0, row["step"] - 1)  # step 0 is an evaluation
                stages.append(StageSpan(row["stage"], before, row["step"]))
        return stages

    def summary(self, name: str) -> MetricSummary | None:
        """First, best and last value; None if no finite value was logged."""
        values = [value for _, value in self.points(name) if value is not None]
        if not values:
            return None
        sign = direction(name)
        best = max(values, key=lambda value: sign * value) if sign else None
        return MetricSummary(name, values[0], best, values[-1])

    def milestones(self, name: str) -> list[tuple[str, float]]:
        """The first value, then the last value of each stage: [("start", .02), ("warmup", .2), ("train", .9)]."""
        found = [(row["stage"], row[name]) for row in self.rows if row.get(name) is not None]
        if not found:
            return []
        marks = [("start", found[0][1])]
        for index, (stage, value) in enumerate(found):
            last_of_stage = index + 1 == len(found) or found[index + 1][0] != stage
            if index > 0 and last_of_stage:
                marks.append((stage, value))
        return marks


def read_lines(path: Path, keys: Mapping[str, type] = ANY_KEYS) -> list[dict[str, Any]]:
    """The objects of a jsonl file, without damaged lines, which a warning names once; see `parse_lines`."""
    rows, damaged = parse_lines(path, keys)
    if damaged:
        _warn_of(path, damaged)
    return rows


@cache
def _warn_of(path: Path, damaged: str) -> None:
    logging.getLogger(__name__).warning("%s: %s left out", path, damaged)


def parse_lines(path: Path, keys: Mapping[str, type] = ANY_KEYS) -> tuple[list[dict[str, Any]], str]:
    """The objects of a jsonl file, and which of its lines are damaged, such as "line 3 is damaged and".

    The unfinished last line of a killed run is left out, and counts as no damage.

    Args:
        keys: of each object, with the types of their values; a line without them is damaged.
    """
    rows, damaged = list[dict[str, Any]](), list[str]()
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError:
            if number < len(lines):
                damaged.append(str(number))
            continue
        if isinstance(found, dict) and all(type(found.get(name)) is kind for name, kind in keys.items()):
            rows.append(found)
        else:
            damaged.append(str(number))
    words = f"lines {listed(damaged)} are" if len(damaged) > 1 else f"line {listed(damaged)} is"
    return rows, f"{words} damaged and" if damaged else ""


def write_atomically(path: Path, text: str) -> Path:
    """Writes a file and its folder, so that neither a reader nor a power cut leaves a partial file; see `replacing`."""
    make_folder(path.parent)
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def trajectory_files(run: Path) -> list[tuple[int, Path]]:
    """(step, file) of every file of sampled texts, in step order."""
    found = ((path.stem.removeprefix("step_"), path) for path in (run / TRAJECTORIES).glob("step_*.jsonl"))
    return sorted((int(step), path) for step, path in found if step.isdecimal())


def direction(name: str) -> int:
    """1 if higher is better, -1 if lower is better, 0 if neither."""
    parts = name.split("/")
    if name.endswith(STDERR) or parts[-1] == "std" or any(word in parts[-1] for word in ("length", "truncated")):
        return 0
    if parts[0] not in ("eval", "reward"):
        return 0
    return -1 if any(word in parts[-1] for word in LOWER_IS_BETTER) or "unscored" in parts or name == CANARY else 1


def rank_key(name: str, value: float) -> float:
    """A number that is larger where the metric is better. A metric without a direction counts as better if higher."""
    lower = direction(name) < 0 or name.startswith("loss/")
    return -value if lower else value


def headline_names(names: Iterable[str]) -> list[str]:
    """The main metrics of a run: one of each evaluation set (accuracy, or the first one) and the mean reward."""
    names = list(names)
    sets: dict[str, str] = {}
    for name in names:
        if name.startswith("eval/") and not name.endswith(STDERR):
            held = name.rpartition("/")[0]
            if held not in sets or (name.endswith("/accuracy") and not sets[held].endswith("/accuracy")):
                sets[held] = name
    return [*sets.values(), *(["reward/mean"] if "reward/mean" in names else [])]


def short(value: float | None, digits: int = 4) -> str:
    """A short form of a number: `0.9123`, `1.2e-05`, `31`, `48.2k`."""
    if value is None:
        return "–"  # noqa: RUF001
    if abs(value) >= 1e4:
        for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.{digits}g}{letter}"
    return f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
