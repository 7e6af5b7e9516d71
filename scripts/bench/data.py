"""Section `data`: seconds and memory of many short rows of a jsonl file, and those of the package datasets.

`rft` reads and checks the rows and counts the tokens of their prompts, as a run does before it loads a model.
`datasets` converts the file with `load_dataset("json")`, into an empty cache, and counts with `map` and as many
processes. Each side then reads every row once, and runs in a process of its own.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.options import check_positive
from bench.process import HERE, call
from bench.results import machine, ratio_table, show

SIDES = ("rft", "datasets")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `data`."""
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of about 55 bytes (default: a million)")
    parser.add_argument("--repeats", type=int, default=3, help="measured times (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/data.json"), help="where the numbers go")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures both sides in turn, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a process failed.
    """
    check_positive(arguments, "rows", "repeats")
    numbers: dict[str, Any] = {"machine": machine("datasets"), "rows": arguments.rows}
    numbers |= {side: {} for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        file = Path(name) / "rows.jsonl"
        with file.open("w") as lines:
            for number in range(arguments.rows):
                lines.write(f'{{"prompt": "{number:07d}: {number % 8999} + 17 =", "answer": "{number % 8999 + 17}"}}\n')
        for turn in range(arguments.repeats):
            for side in SIDES:
                out = Path(name) / "numbers.json"
                cache = Path(name) / f"cache{turn}"
                call([str(HERE / "data_side.py"), side, str(file), str(cache), str(out)])
                for what, value in json.loads(out.read_text()).items():
                    numbers[side].setdefault(what, []).append(value)
    show(Console(), arguments.out, numbers, table(numbers))


def table(numbers: dict[str, Any]) -> Table:
    """Both sides, and the ratios of `datasets` to `rft`."""
    rows = {
        "seconds to load": "load_s",
        "seconds to count tokens": "count_s",
        "seconds to read all rows": "read_s",
        "memory after that, bytes a row": "row_bytes",
    }
    shown = ratio_table(f"{numbers['rows']:,} rows, medians", rows, SIDES, numbers)
    shown.caption = "memory without the mapped parts of files"
    return shown
