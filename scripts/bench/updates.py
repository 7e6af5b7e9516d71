"""Updates of the same rows in several ways, each in its own process, so that its peak memory can be measured."""

import json
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.process import call


def compare(console: Console, folder: Path, sides: dict[str, list[str]], repeats: int) -> dict[str, dict[str, Any]]:
    """Runs every side on the workload of the folder.

    Args:
        sides: the arguments of `bench.update_side` by a name; gradients are compared with those of the last side.
        repeats: measured updates after one to warm up.

    Returns:
        The output of each side, with `median_s`, `padding` (share of padding in the computed tokens), and
        `gradient_difference` (the largest difference over the largest entry).

    Raises:
        RuntimeError: a side failed.
    """
    found = {}
    for name, arguments in sides.items():
        console.rule(name)
        call(["-m", "bench.update_side", str(folder), name, str(repeats), *arguments])
        side = json.loads((folder / f"{name}.json").read_text())
        side["median_s"] = statistics.median(side["seconds"][1:])
        side["padding"] = max(0.0, 1 - side["tokens"] / side["computed"])
        found[name] = side
    reference = torch.load(folder / f"{name}.pt", weights_only=True)
    largest = max(gradient.abs().max() for gradient in reference.values())
    for name, side in found.items():
        gradients = torch.load(folder / f"{name}.pt", weights_only=True)
        assert gradients.keys() == reference.keys()
        furthest = max((gradients[key] - reference[key]).abs().max() for key in reference)
        side["gradient_difference"] = float(furthest / largest)
    return found


def table(title: str, sides: dict[str, dict[str, Any]]) -> Table:
    """The table of the sides; ratios are relative to the first side."""
    shown = Table(title=title)
    first, *others = sides
    last = [*sides][-1]
    shown.add_column("", no_wrap=True)
    for name in sides:
        shown.add_column(name, justify="right")
    for name in others:
        shown.add_column(f"{name} / {first}", justify="right")

    def line(what: str, key: str, pattern: str, ratio: bool) -> None:
        values = [side[key] for side in sides.values()]
        ratios = [f"{value / values[0]:.2f}" if ratio and values[0] else "" for value in values[1:]]
        shown.add_row(what, *[format(value, pattern) for value in values], *ratios)

    line("seconds", "median_s", ".3f", True)
    line("forwards", "forwards", "d", False)
    line("tokens", "tokens", "d", False)
    line("computed", "computed", "d", True)
    line("padding", "padding", ".1%", False)
    line("memory (GiB)", "memory_gib", ".3f", True)
    line("gradient off", "gradient_difference", ".1e", False)
    shown.caption = (
        "memory: the peak above the memory before the update; gradient: the largest difference from that of "
        f"{last}, over its largest entry"
    )
    return shown
