"""Section `packing`: an update on rows of skewed lengths, packed, sorted and padded, and padded in plain PyTorch."""

import argparse
import tempfile
from pathlib import Path

from rich.console import Console

from bench.options import check_positive
from bench.results import machine, show
from bench.updates import compare, table
from bench.workload import PROMPT_TOKENS, SIZES, Workload, skewed


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `packing`."""
    parser.add_argument("--rows", type=int, default=64, help="rows of the update (default: 64)")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest response (default: 256)")
    parser.add_argument("--size", choices=sorted(SIZES), default="21m", help="the model (default: 21m)")
    parser.add_argument("--forward-rows", type=int, default=8, help="rows of a forward of the plain side (default: 8)")
    parser.add_argument("--tokens", type=int, help="cap of a forward of rft (default: what the plain side's has)")
    parser.add_argument("--repeats", type=int, default=2, help="measured updates after one to warm up (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/packing.json"), help="for the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a side failed.
    """
    console = Console()
    check_positive(arguments, "repeats", "forward_rows")
    workload = Workload(arguments.size, skewed(arguments.rows, arguments.longest))
    tokens = arguments.tokens or arguments.forward_rows * (PROMPT_TOKENS + workload.longest)
    cap = f"actor.micro_batch_tokens={tokens}"
    sides = {
        "packed": ["rft", cap, "actor.packing=true"],
        "sorted": ["rft", cap, "actor.packing=false"],
        "plain": ["plain", str(arguments.forward_rows)],
    }
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        workload.write(Path(name))
        found = compare(console, Path(name), sides, arguments.repeats)
    numbers = {
        "workload": workload.plain(),
        "micro_batch_tokens": tokens,
        "forward_rows": arguments.forward_rows,
        "machine": machine(),
        "sides": found,
        "ratio": {name: side["median_s"] / found["packed"]["median_s"] for name, side in found.items()},
    }
    title = f"an update of {workload.rows} rows with responses of at most {workload.longest} tokens, median"
    show(console, arguments.out, numbers, table(title, found))
