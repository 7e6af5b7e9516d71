"""Section `checkpoint`: seconds and memory of a checkpoint of two ranks, and of gathering the state on rank 0.

Both sides save the same sharded weights and AdamW state, in turn, in the same processes. `rft` writes it as a run does.
`gathered` is `get_model_state_dict` and `get_optimizer_state_dict` of torch with a full state dict on rank 0, and
`torch.save`.
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
from bench.workload import SIZES

SIDES = ("rft", "gathered")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `checkpoint`."""
    parser.add_argument("--size", choices=sorted(SIZES), default="150m", help="the model (default: 150m)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="measured times after one to warm up (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/checkpoint.json"), help="for the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures both sides, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a process failed.
    """
    check_positive(arguments, "ranks", "repeats")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        side = [str(HERE / "checkpoint_side.py"), name, arguments.size, str(arguments.repeats)]
        call([*launch, *side], {"OMP_NUM_THREADS": "1"})
        measured = json.loads((Path(name) / "checkpoint.json").read_text())
    numbers = {"machine": machine(), "size": arguments.size, "ranks": arguments.ranks, **measured}
    show(Console(), arguments.out, numbers, table(numbers))


def table(numbers: dict[str, Any]) -> Table:
    """Both sides, and the ratios of `gathered` to `rft`."""
    rows = {
        "the run waits (s)": "blocking_s",
        "until it is on the disk (s)": "whole_s",
        "memory that rank 0 takes (MiB)": "first_mib",
        "memory that the last rank takes (MiB)": "last_mib",
        "files (MiB)": "files_mib",
    }
    shown = ratio_table(f"a checkpoint of {numbers['ranks']} ranks, medians", rows, SIDES, numbers)
    shown.caption = f"{numbers['state_mib']:.0f} MiB of weights and AdamW state, sharded over the ranks"
    return shown
