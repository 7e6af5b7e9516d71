"""Prints and saves the numbers of a section, and describes the machine."""

import importlib.metadata
import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine(*packages: str) -> dict[str, Any]:
    """Processors, threads, and the versions of torch, transformers and further packages."""
    import torch

    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers", *packages)}
    return {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), **versions}


def ratio_table(title: str, rows: Mapping[str, str], sides: tuple[str, str], numbers: Mapping[str, Any]) -> Table:
    """The medians of two sides, and their ratios.

    Args:
        title: of the table.
        rows: by the title of each row, the name of what is measured.
        sides: names; the ratio is that of the second to the first.
        numbers: the measured numbers by side and name.
    """
    shown = Table(title=title)
    for header in ("", *sides, f"{sides[1]} / {sides[0]}"):
        shown.add_column(header, justify="right" if header else "left")
    for header, name in rows.items():
        found = [statistics.median(numbers[side][name]) for side in sides]
        ratio = f"{found[1] / found[0]:.2f}" if found[0] else "–"  # noqa: RUF001
        shown.add_row(header, *(f"{number:.2f}" for number in found), ratio)
    return shown


def show(console: Console, out: Path, numbers: dict[str, Any], *tables: Table) -> None:
    """Prints the tables and writes the numbers into a file."""
    for table in tables:
        console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(f"numbers: {out}")
