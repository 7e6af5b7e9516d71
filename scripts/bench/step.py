"""Section `step`: seconds per stage of a GRPO step, and the same work through Runs TRL in its own process."""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.options import check_positive
from bench.process import HERE, call, has_trl
from bench.results import machine, show
from bench.workload import Workload, equal, skewed

# One optimizer step a batch, as TRL's defaults take, so that neither side computes old log-probabilities apart; and the
# prompt of a group is computed once.
RFT = ("batch.minibatches=1", "actor.share_prefix=true")
STAGES = ("rollout", "reward", "annotate", "update", "refresh")
EQUAL_LENGTH = 64


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a side failed, or trained another number of tokens than it was to.
    """
    console = Console()
    rows = arguments.rows
    check_positive(arguments, "repeats")
    if arguments.trl_rows < 1 or rows % arguments.trl_rows:
        raise ValueError(f"--trl-rows {arguments.trl_rows}: give a divisor of --rows {rows}")
    lengths = equal(rows, min(EQUAL_LENGTH, arguments.longest)) if arguments.equal else skewed(rows, arguments.longest)
    workload = Workload(arguments.size, lengths)
    steps = 1 + arguments.repeats
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        folder = Path(name)
        parameters = workload.write(folder)
        console.print(
            f"{parameters / 1e6:.1f}M parameters, {workload.rows} rows in {len(lengths)} groups, {workload.sampled} "
            f"sampled tokens (mean {workload.sampled / workload.rows:.0f}, longest {workload.longest}); "
            f"1 step to warm up and {arguments.repeats} measured"
        )
        console.rule("rft")
        results = {"rft": rft_side(folder, workload, steps)}
        if has_trl(console, arguments.rft_only):
            console.rule("TRL")
            results["trl"] = trl_side(folder, workload, steps, arguments.trl_rows)
    numbers = summary(workload, parameters, results)
    show(console, arguments.out, numbers, table(numbers))


def rft_side(folder: Path, workload: Workload, steps: int) -> dict[str, Any]:
    """Runs the main job in its own process; returns what it logged in every step."""
    overrides = [f"rollout.engine.workload={folder}", f"batch.prompts={len(workload.lengths)}", f"steps={steps}"]
    overrides += [f"rollout.max_new_tokens={workload.longest}", *RFT]
    call(["-m", "rft.main", "-cd", str(HERE), "-cn", "step", *overrides])
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    logged = [row for row in map(json.loads, lines) if row["step"] > 0]
    cpu = json.loads((folder / "cpu.json").read_text())
    side = {
        "steps": [
            {stage: row[f"time/{stage}_s"] for stage in STAGES} | {"total": row["time/step_s"], "cpu": seconds}
            for row, seconds in zip(logged, cpu, strict=True)
        ],
        "tokens": [round(row["length/trained"] * workload.rows) for row in logged],
        "grad_norm": [row["grad_norm"] for row in logged],
        "memory_gib": logged[-1]["memory/peak_gib"],
    }
    return checked("rft", side, workload, steps)


def trl_side(folder: Path, workload: Workload, steps: int, forward_rows: int) -> dict[str, Any]:
    """Runs TRL in its own process."""
    call(["-m", "bench.trl_side", str(folder), str(steps), str(forward_rows)])
    side = json.loads((folder / "trl.json").read_text())
    return checked("TRL", side, workload, steps) | {"forward_rows": forward_rows}


def checked(name: str, side: dict[str, Any], workload: Workload, steps: int) -> dict[str, Any]:
    """The side, if all its steps trained exactly the workload."""
    if side["tokens"] != [workload.sampled] * steps or len(side["steps"]) != steps:
        raise RuntimeError(f"{name} trained {side['tokens']} tokens in its steps, not {steps} x {workload.sampled}")
    return side


def summary(workload: Workload, parameters: int, results: dict[str, Any]) -> dict[str, Any]:
    """Medians over the measured steps, and the ratio."""
    sides = {}
    for name, side in results.items():
        measured = side["steps"][1:]
        seconds = {stage: statistics.median(step[stage] for step in measured) for stage in measured[0]}
        sides[name] = side | {
            "median_s": seconds,
            "samples_per_s": workload.rows / seconds["total"],
            "tokens_per_s": workload.sampled / seconds["total"],
        }
    numbers = {
        "workload": workload.plain() | {"parameters": parameters},
        "machine": machine(*(("trl",) if "trl" in sides else ())),  # both sides begin with as many threads
        "sides": sides,
    }
    if "trl" in sides:
        numbers["ratio"] = sides["trl"]["median_s"]["total"] / sides["rft"]["median_s"]["total"]
    return numbers


def table(numbers: dict[str, Any]) -> Table:
    """The table of the numbers."""
    sides = numbers["sides"]
    shown = Table(title="one GRPO step, float32, median")
    shown.add_column("")
    for name in sides:
        shown.add_column("rft" if name == "rft" else f"TRL {numbers['machine']['trl']}", justify="right")
    if "ratio" in numbers:
        shown.add_column("TRL / rft", justify="right")

    def line(title: str, values: list[Any], pattern: str, ratio: bool = True) -> None:
        cells = ["" if value is None else format(value, pattern) for value in values]
        if "ratio" in numbers:
            cells.append(f"{values[1] / values[0]:.2f}" if ratio and None not in values else "")
        shown.add_row(title, *cells)

    for stage in STAGES:
        line(f"{stage} (s)", [side["median_s"].get(stage) for side in sides.values()], ".3f")
    shown.add_section()
    line("total (s)", [side["median_s"]["total"] for side in sides.values()], ".3f")
    line("processor time (s)", [side["median_s"]["cpu"] for side in sides.values()], ".3f")
    line("samples per second", [side["samples_per_s"] for side in sides.values()], ".2f")
    line("sampled tokens per second", [side["tokens_per_s"] for side in sides.values()], ".1f")
    line("trained tokens a step", [side["tokens"][-1] for side in sides.values()], "d", ratio=False)
    line("peak memory (GiB)", [side["memory_gib"] for side in sides.values()], ".2f")
    if "ratio" in numbers:
        shown.caption = f"a step of rft is {numbers['ratio']:.2f} times as fast"
    return shown
