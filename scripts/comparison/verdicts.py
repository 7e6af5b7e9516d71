"""Compares two recordings run by run."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TOLERANCE = 1e-6  # for runs of several ranks: absolute, and relative for numbers above 1


@dataclass
class Verdict:
    """The result of comparing one run.

    Attributes:
        name: the name of the run.
        ranks: number of processes.
        steps: number of steps in both recordings.
        numbers: number of compared numbers of metrics and files.
        tensors: number of compared tensors.
        largest: the largest difference; relative for numbers above 1.
        where: the metric, file or tensor of the largest difference.
        problems: why the comparison failed; empty if it passed.
    """

    name: str
    ranks: int
    steps: int = 0
    numbers: int = 0
    tensors: int = 0
    largest: float = 0.0
    where: str = ""
    problems: list[str] = field(default_factory=list)

    def differ(self, difference: float, where: str) -> None:
        """Keeps a difference if it is the largest so far."""
        if difference > self.largest or math.isnan(difference):
            self.largest, self.where = (math.inf if math.isnan(difference) else difference), where


def compare(one: dict[str, Any], other: dict[str, Any], tensors: tuple[Path, Path]) -> list[Verdict]:
    """Compares the runs of two recordings; a run that only one of them has is a problem.

    Args:
        one: the first recording.
        other: the second recording.
        tensors: the folders with the values of their tensors.
    """
    names = [*one["runs"], *(name for name in other["runs"] if name not in one["runs"])]
    verdicts = []
    for name in names:
        if name in one["runs"] and name in other["runs"]:
            files = (tensors[0] / f"{name}.safetensors", tensors[1] / f"{name}.safetensors")
            verdicts.append(compare_run(name, one["runs"][name], other["runs"][name], files))
        else:
            side = "first" if name in one["runs"] else "second"
            verdicts.append(Verdict(name, 0, problems=[f"only the {side} recording has the run"]))
    return verdicts


def compare_run(name: str, one: dict[str, Any], other: dict[str, Any], values: tuple[Path, Path]) -> Verdict:
    """Compares one run: exactly for one process, up to `TOLERANCE` for several."""
    verdict = Verdict(name, one["ranks"])
    if one["ranks"] != other["ranks"]:
        verdict.problems.append(f"{one['ranks']} ranks, and {other['ranks']}")
    compare_steps(verdict, one["steps"], other["steps"])
    compare_files(verdict, one["files"], other["files"])
    compare_tensors(verdict, one["tensors"], other["tensors"], values)
    if verdict.ranks > 1 and verdict.largest > TOLERANCE:
        verdict.problems.append(f"{verdict.where} differs by more than {TOLERANCE:g}")
    if verdict.numbers + verdict.tensors == 0:
        verdict.problems.append("nothing was compared")
    return verdict


def compare_steps(verdict: Verdict, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compares the metrics of every step."""
    report_missing(verdict, "step", one, other)
    seen = [{name for row in side.values() for name in row} for side in (one, other)]
    report_missing(verdict, "metric", *seen)
    for step in (step for step in one if step in other):
        verdict.steps += 1
        both = seen[0] & seen[1]
        missing = sorted((one[step].keys() ^ other[step].keys()) & both)
        verdict.problems += [f"step {step}: only one recording has {name}" for name in missing]
        for metric in sorted(one[step].keys() & other[step].keys()):
            compare_numbers(verdict, one[step][metric], other[step][metric], f"{metric} of step {step}")


def compare_files(verdict: Verdict, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Compares the numbers and the digests of output files."""
    report_missing(verdict, "file", one, other)
    for path in (path for path in one if path in other):
        expected, found = one[path]["numbers"], other[path]["numbers"]
        if len(expected) != len(found):
            verdict.problems.append(f"{path}: {len(expected)} numbers, and {len(found)}")
        for index, (first, second) in enumerate(zip(expected, found, strict=False)):
            compare_numbers(verdict, first, second, f"number {index} of {path}")
        if one[path]["sha256"] != other[path]["sha256"]:
            verdict.problems.append(f"{path}: the contents differ")


def compare_numbers(verdict: Verdict, one: float, other: float, where: str) -> None:
    """Compares two numbers."""
    verdict.numbers += 1
    if repr(float(one)) == repr(float(other)):
        return
    verdict.differ(abs(one - other) / max(1.0, abs(one)), where)
    if verdict.ranks == 1:
        verdict.problems.append(f"{where}: {one!r}, and {other!r}")


def compare_tensors(
    verdict: Verdict, one: dict[str, str], other: dict[str, str], values: tuple[Path, Path]
) -> None:  # fmt: skip
    """Compares tensors by their digests, and by their values if the digests differ.

    A tensor whose name only one recording has is paired with one of equal digest, so that tensors may be renamed.
    """
    alone = [sorted(one.keys() - other.keys()), sorted(other.keys() - one.keys())]
    for name in list(alone[0]):
        renamed = next((candidate for candidate in alone[1] if other[candidate] == one[name]), None)
        if renamed is not None:
            verdict.tensors += 1
            alone[0].remove(name)
            alone[1].remove(renamed)
    report_missing(verdict, "tensor", *alone)
    both = sorted(one.keys() & other.keys())
    verdict.tensors += len(both)
    different = [name for name in both if one[name] != other[name]]
    if not different:
        return
    expected, found = (load_file(path) for path in values)
    for name in different:
        first, second = expected[name], found[name]
        if first.shape != second.shape or first.dtype != second.dtype:
            verdict.problems.append(
                f"{name}: {first.dtype} {list(first.shape)}, and {second.dtype} {list(second.shape)}"
            )
            continue
        gap = (first.double() - second.double()).abs() / first.double().abs().clamp(min=1.0)
        verdict.differ(torch.max(gap).item(), name)
        if verdict.ranks == 1:
            verdict.problems.append(f"{name}: the values differ")


def report_missing(verdict: Verdict, kind: str, one: Iterable[str], other: Iterable[str]) -> None:
    """Adds a problem for the names that only one recording has."""
    for side, names in (("first", set(one) - set(other)), ("second", set(other) - set(one))):
        if names:
            verdict.problems.append(f"only the {side} recording has the {kind} {', '.join(sorted(names))}")


def table(verdicts: list[Verdict]) -> str:
    """Returns the verdicts as a markdown table, with the problems of each run below it."""
    lines = [
        "| run | ranks | steps | numbers | tensors | largest difference | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in verdicts:
        passed = "bit-equal" if each.largest == 0 else f"within {TOLERANCE:g}"
        result = "FAILED" if each.problems else passed
        cells = [each.name, each.ranks, each.steps, each.numbers, each.tensors, f"{each.largest:.3g}", result]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for each in verdicts:
        if each.problems:
            lines += ["", f"{each.name}: {len(each.problems)} problems", ""]
            lines += [f"- {problem}" for problem in each.problems[:10]]
            if each.where:
                lines.append(f"- the largest difference is in {each.where}")
    return "\n".join(lines) + "\n"
