"""Reads a run folder back: `metrics.jsonl`, `trajectories/`, and summaries of them for console and pages."""

import json
import logging
import math
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rft.errors import listed
from rft.logger.disk import make_folder, write_text

METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories"
WARNINGS = "warnings.txt"
WORST_TOKENS = "worst_tokens.jsonl"
ELAPSED = "time/elapsed_s"
STDERR = "_stderr"  # `eval/test/accuracy_stderr` is the standard error of `eval/test/accuracy`
METRICS_KEYS: Mapping[str, type] = MappingProxyType({"step": int, "stage": str})
STEP_KEY: Mapping[str, type] = MappingProxyType({"step": int})
ANY_KEYS: Mapping[str, type] = MappingProxyType({})
LARGEST = 2**63  # above every whole number of a file that is read
LOWER_IS_BETTER = ("loss", "perplexity")
CANARY = "reward/canary"
BEGINNING = re.compile(r'\{"step": (\d+), "stage": "(\w+)"[,}]')  # of a line of the metrics

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
    """The rows of `metrics.jsonl`, oldest first: 16 bytes in memory for each number of a row.

    Attributes:
        steps: the step of each row.

    Args:
        rows: of the file, or of its beginning; `add` appends others.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.steps = array("q")
        self._stages: list[str] = []  # of each row
        self._columns: dict[str, tuple[array[int], array[float]]] = {}  # numbers of rows; their values, NaN for null
        for row in rows:
            self.add(row)

    @classmethod
    def of(cls, run: Path) -> "History":
        """Reads a run folder; without metrics the history is empty."""
        path = run / METRICS
        return cls(read_lines(path, METRICS_KEYS) if path.exists() else ())

    def add(self, row: Mapping[str, Any]) -> None:
        """Appends a row; NaN counts as null, and what is no number is left out."""
        number = len(self.steps)
        self.steps.append(row["step"])
        self._stages.append(sys.intern(row["stage"]))
        for name, value in row.items():
            if name not in ("step", "stage"):
                if (column := self._columns.get(name)) is None:
                    column = self._columns[name] = (array("q"), array("d"))
                try:
                    column[1].append(math.nan if value is None else value)
                except (TypeError, OverflowError):  # a line is damaged there
                    continue
                column[0].append(number)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows as they are in the file."""
        places = dict.fromkeys(self._columns, 0)
        for number, (step, stage) in enumerate(zip(self.steps, self._stages, strict=True)):
            row: dict[str, Any] = {"step": step, "stage": stage}
            for name, (numbers, values) in self._columns.items():
                if places[name] < len(numbers) and numbers[places[name]] == number:
                    row[name] = _finite(values[places[name]])
                    places[name] += 1
            yield row

    @property
    def names(self) -> list[str]:
        """Every metric, in the order of first appearance."""
        return list(self._columns)

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def elapsed(self) -> float:
        """Seconds from the beginning of the run to the last row, as logged."""
        return max(self.values(ELAPSED), default=0.0)

    def points(self, name: str) -> list[Point]:
        """(step, value) of one metric."""
        numbers, values = self._columns.get(name, ((), ()))
        return [(self.steps[number], _finite(value)) for number, value in zip(numbers, values, strict=True)]

    def values(self, name: str) -> list[float]:
        """The values of one metric that are not null."""
        return [value for value in self._columns.get(name, ((), ()))[1] if value == value]

    def stages(self) -> list[StageSpan]:
        """The stages in order; each begins where the one before it ended."""
        return stage_spans(zip(self.steps, self._stages, strict=True))

    def summary(self, name: str) -> MetricSummary | None:
        """First, best and last value; None if no finite value was logged."""
        values = self.values(name)
        if not values:
            return None
        best = {1: max, -1: min}.get(direction(name))
        return MetricSummary(name, values[0], None if best is None else best(values), values[-1])

    def milestones(self, name: str) -> list[tuple[str, float]]:
        """The first value, then the last value of each stage: [("start", .02), ("warmup", .2), ("train", .9)]."""
        numbers, values = self._columns.get(name, ((), ()))
        found = [(self._stages[n], value) for n, value in zip(numbers, values, strict=True) if value == value]
        if not found:
            return []
        stages = groupby(found[1:], key=itemgetter(0))
        return [("start", found[0][1]), *((stage, list(group)[-1][1]) for stage, group in stages)]


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def stage_spans(rows: Iterable[tuple[int, str]]) -> list[StageSpan]:
    """The stages of (step, stage) pairs in order; each begins where the one before it ended."""
    spans: list[StageSpan] = []
    for name, group in groupby(rows, key=itemgetter(1)):
        steps = [step for step, _ in group]
        start = spans[-1].end if spans else max(0, steps[0] - 1)  # step 0 is an evaluation
        spans.append(StageSpan(name, start, max(steps)))
    return spans


def read_stages(run: Path) -> list[StageSpan]:
    """`History.stages` of a run folder. Of lines that begin as the log writes them, the numbers are not parsed."""
    steps, stages, path = array("q"), list[str](), run / METRICS
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            head = BEGINNING.match(line)
            if head is None or not line.endswith("}\n"):
                return History.of(run).stages()
            steps.append(int(head[1]))
            stages.append(sys.intern(head[2]))
    return stage_spans(zip(steps, stages, strict=True))


def read_lines(path: Path, keys: Mapping[str, type] = ANY_KEYS) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file, without damaged lines, which a warning names once; see `parsed_lines`."""
    damaged: list[int] = []
    for _, row in parsed_lines(path, keys, damaged):
        yield row
    warn_of(path, damage(damaged))


def parsed_lines(path: Path, keys: Mapping[str, type], damaged: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a jsonl file and their objects, without damaged lines.

    The unfinished last line of a killed run is left out, and counts as no damage.

    Args:
        keys: of each object, with the types of their values; a line without them is damaged.
        damaged: the numbers of damaged lines are added to it.

    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    damaged.append(number)
                continue
            if isinstance(found, dict) and all(_is(found.get(name), kind) for name, kind in keys.items()):
                yield line, found
            else:
                damaged.append(number)


def _is(value: Any, kind: type) -> bool:
    return type(value) is kind and (not isinstance(value, int) or abs(value) < LARGEST)


def damage(damaged: Sequence[int]) -> str:
    """Words about damaged lines, such as "line 3 is damaged and"; empty without one."""
    numbers = listed([str(number) for number in damaged])
    return f"{f'lines {numbers} are' if len(damaged) > 1 else f'line {numbers} is'} damaged and" if damaged else ""


@cache
def warn_of(path: Path, words: str) -> None:
    """Logs once that lines of a file are left out; nothing without words of `damage`."""
    if words:
        logging.getLogger(__name__).warning("%s: %s left out", path, words)


def write_atomically(path: Path, text: str) -> Path:
    """Writes a file and its folder, so that neither a reader nor a power cut leaves a partial file; see `replacing`."""
    make_folder(path.parent)
    write_text(path, text)
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
    """The main metrics of a run: one of each evaluation set (accuracy, or the first one) and the mean reward.

    Of a source of a set it is the accuracy or the score; the further numbers of a reward term have no main one.
    """
    names = list(names)
    sets: dict[str, str] = {}
    for name in names:
        below = name.count("/") > 2 and not name.endswith(("/accuracy", "/score"))
        if name.startswith("eval/") and not name.endswith(STDERR) and not below:
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
