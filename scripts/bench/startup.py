"""Section `startup`: seconds from the command line to the composed config and to the first numbers, and TRL's."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.options import check_positive
from bench.process import HERE, call, environment, has_trl
from bench.results import machine, show
from bench.workload import GROUP, Workload, equal

SIZE, LENGTH = "tiny", 8
CONFIG, BEFORE, FIRST = "the composed config (--cfg job)", "ready to train", "the first step is done"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `startup`."""
    parser.add_argument("--repeats", type=int, default=3, help="measured starts after one to warm up (default: 3)")
    parser.add_argument("--rft-only", action="store_true", help="leaves TRL out")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/startup.json"), help="for the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Starts both, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a side failed.
    """
    console = Console()
    check_positive(arguments, "repeats")
    starts = {"rft": start_rft}
    if has_trl(console, arguments.rft_only):
        starts["trl"] = start_trl
    found: dict[str, list[dict[str, float]]] = {side: [] for side in starts}
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        folder = Path(name)
        Workload(SIZE, equal(GROUP, LENGTH)).write(folder)
        for number in range(1 + arguments.repeats):
            for side, start in starts.items():
                found[side].append(start(folder, number))
    medians = {
        side: {what: statistics.median(run[what] for run in runs[1:]) for what in runs[0]}
        for side, runs in found.items()
    }
    numbers: dict[str, Any] = {
        "machine": machine(*(("trl",) if "trl" in found else ())),
        "seconds": found,
        "median_s": medians,
    }
    if "trl" in found:
        numbers["ratio"] = {what: medians["trl"][what] / medians["rft"][what] for what in (BEFORE, FIRST)}
    show(console, arguments.out, numbers, table(numbers))


def start_rft(folder: Path, number: int) -> dict[str, float]:
    """Seconds until the main job prints its config, and until each line of `metrics.jsonl` is written.

    The first line is the evaluation before anything is trained, so models, data and engine are there then.
    """
    started = time.perf_counter()
    call(["-m", "rft.main", "--cfg", "job"], stdout=subprocess.DEVNULL)
    seconds = {CONFIG: time.perf_counter() - started}
    output = folder / f"run{number}"
    overrides = [f"rollout.engine.workload={folder}", "batch.prompts=1", "steps=1", f"rollout.max_new_tokens={LENGTH}"]
    command = [sys.executable, "-m", "rft.main", "-cd", str(HERE), "-cn", "step", *overrides, f"output_dir={output}"]
    metrics = output / "metrics.jsonl"
    with (folder / "output.txt").open("w") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        for lines, what in enumerate((BEFORE, FIRST)):
            while not (metrics.exists() and metrics.read_text().count("\n") > lines):
                if process.poll() not in (None, 0):
                    raise RuntimeError(f"the main job failed:\n{(folder / 'output.txt').read_text()}")
                time.sleep(0.005)
            seconds[what] = time.perf_counter() - started
        process.wait()
    return seconds


def start_trl(folder: Path, number: int) -> dict[str, float]:
    """Seconds after which TRL is imported, its trainer made of the same model and data, and its first step done."""
    started = time.time()
    call(["-m", "bench.trl_side", str(folder), "1", str(GROUP)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    reached = json.loads((folder / "trl.json").read_text())["reached"]
    titles = {"imported": "imported", "trainer": BEFORE, "first step": FIRST}
    return {titles[what]: moment - started for what, moment in reached.items()}


def table(numbers: dict[str, Any]) -> Table:
    """The table of the medians."""
    sides = numbers["median_s"]
    shown = Table(title=f"seconds from the start of the process, a model of size {SIZE!r}, median")
    shown.add_column("")
    for side in sides:
        shown.add_column(side if side == "rft" else f"TRL {numbers['machine']['trl']}", justify="right")
    if "ratio" in numbers:
        shown.add_column("TRL / rft", justify="right")
    for what in dict.fromkeys(what for side in sides.values() for what in side):
        cells = [f"{side[what]:.2f}" if what in side else "" for side in sides.values()]
        if "ratio" in numbers:
            cells.append(f"{numbers['ratio'][what]:.2f}" if what in numbers["ratio"] else "")
        shown.add_row(what, *cells)
    shown.caption = "ready to train: rft has evaluated its held-out set by then, TRL has made its trainer"
    return shown
