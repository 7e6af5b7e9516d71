"""Section `asynchronous`: seconds of a step and final accuracy of runs with a vLLM server, by `rollout.staleness`.

`--task skewed`: the answers of a model that learns nothing, whose lengths are nearly geometric, so that a synchronous
step waits for the longest. `--task default`: the default run, so that its accuracy shows what older weights cost.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.options import check_positive
from bench.process import call
from bench.results import machine, show
from bench.rollout import EAGER, VARIABLES

ACCURACY, HELD_OUT = "eval/heldout/accuracy", 256  # answers, of which the accuracy is a mean
COMMON = ("rollout=vllm_server", EAGER, "actor.model_config.head_dim=32", "algorithm.old_logprobs=rollout")
TASKS = {
    "skewed": (
        "warmup=none",
        "actor.optimizer.lr=1e-12",
        "actor.model_config.max_position_embeddings=512",
        "+rollout.engine_args.max_model_len=512",
        "rollout.max_new_tokens=256",
        "eval.every=0",
        "eval.at_start=false",
    ),
    "default": ("+rollout.engine_args.max_model_len=64",),
}
FIRST = 2  # steps that are not measured: the pipeline fills
SHOWN = {
    "seconds of a step": "time/step_s",
    "the trainer waits for text, s": "time/rollout_s",
    "the update, s": "time/update_s",
    "new weights, s": "time/refresh_s",
    "the server waits, s": "time/engine_idle_s",
    "tokens of an answer": "length/mean",
    "tokens of the longest answer": "length/max",
    "age of a token": "staleness/mean",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `asynchronous`."""
    parser.add_argument("--task", choices=TASKS, default="skewed", help="what is trained (default: skewed)")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4], help="of the runs (default: 0 1 4)")
    parser.add_argument("--steps", type=int, default=20, help="of a run (default: 20)")
    parser.add_argument("--seeds", type=int, default=3, help="runs with each staleness, in turn (default: 3)")
    parser.add_argument("--python", default=os.environ.get("RFT_VLLM_PYTHON"), help="an interpreter that has vLLM")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/benchmarks/asynchronous.json"), help="for the numbers"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Runs the task with each staleness and seed, prints tables, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a run failed.
    """
    check_positive(arguments, "seeds")
    if arguments.steps <= FIRST:
        raise ValueError(f"--steps {arguments.steps}: give more than {FIRST}, which are not measured")
    console, found = Console(), {staleness: list[list[dict[str, float]]]() for staleness in arguments.staleness}
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        for seed in range(arguments.seeds):
            for staleness, runs in found.items():
                folder = Path(name) / f"{staleness}-{seed}"
                overrides = [*COMMON, *TASKS[arguments.task], f"rollout.staleness={staleness}", f"seed={seed}"]
                if arguments.python:
                    overrides.append(f"rollout.engine.servers.python={arguments.python}")
                command = ["-m", "rft.main", *overrides, f"steps={arguments.steps}", f"output_dir={folder}"]
                call(command, VARIABLES | {"OMP_NUM_THREADS": "1"})
                runs.append([json.loads(line) for line in (folder / "metrics.jsonl").open()])
    steps = {staleness: [trained(rows) for rows in runs] for staleness, runs in found.items()}
    numbers = {
        "task": arguments.task,
        "machine": machine(),
        "steps": {staleness: [means(rows) for rows in runs] for staleness, runs in steps.items()},
        "accuracy": {staleness: [rows[-1][ACCURACY] for rows in runs] for staleness, runs in found.items()},
    }
    tables = [speed(numbers["steps"])]
    if arguments.task == "default":
        tables.append(accuracies(numbers["accuracy"]))
    show(console, arguments.out, numbers, *tables)


def trained(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The measured steps of a run."""
    return [row for row in rows if row["stage"] == "train" and "time/step_s" in row][FIRST:]


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each shown number over the steps of a run: the time of a run is a sum of steps."""
    return {name: statistics.fmean(row.get(name, 0.0) for row in rows) for name in SHOWN.values()}


def speed(steps: dict[int, list[dict[str, float]]]) -> Table:
    """The means of a step, medians over the runs, and how much faster the steps are than those of the first column."""
    shown = Table(title="a step, mean of a run, median over the runs")
    shown.add_column("rollout.staleness")
    for staleness in steps:
        shown.add_column(str(staleness), justify="right")
    values = {title: [middle(runs, name) for runs in steps.values()] for title, name in SHOWN.items()}
    for title, row in values.items():
        shown.add_row(title, *(f"{value:.3g}" for value in row))
    first, *others = next(iter(values.values()))
    shown.add_row("speed", "1", *(f"{first / other:.2f}" for other in others))
    return shown


def middle(runs: list[dict[str, float]], name: str) -> float:
    """The median of a number over runs."""
    return statistics.median(numbers[name] for numbers in runs)


def accuracies(found: dict[int, list[float]]) -> Table:
    """The accuracy at the end with each staleness."""
    shown = Table(title="held-out accuracy at the end, and the 95 % interval of all answers together (Wilson)")
    for column in ("rollout.staleness", "by seed", "mean", "interval"):
        shown.add_column(column, justify="right")
    for staleness, values in found.items():
        mean, (low, high) = statistics.fmean(values), wilson(statistics.fmean(values), HELD_OUT * len(values))
        by_seed = " ".join(f"{value:.3f}" for value in values)
        shown.add_row(str(staleness), by_seed, f"{mean:.3f}", f"{low:.3f} to {high:.3f}")
    return shown


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of `count` answers (Wilson 1927)."""
    z = 1.96
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)
