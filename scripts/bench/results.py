"""Prints and saves the numbers of a section, and describes the machine."""

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def machine(*packages: str) -> dict[str, Any]:
    """Processors, threads, and the versions of torch, transformers and further packages."""
    import torch

    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers", *packages)}
    return {"cpus": os.cpu_count(), "threads": torch.get_num_threads(), **versions}


def show(console: Console, out: Path, numbers: dict[str, Any], *tables: Table) -> None:
    """Prints the tables and writes the numbers into a file."""
    for table in tables:
        console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(numbers, indent=1) + "\n")
    console.print(f"numbers: {out}")
