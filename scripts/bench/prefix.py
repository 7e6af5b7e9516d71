"""Section `prefix`: an update on groups with a common prompt, which is computed once per group or once per row."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.options import check_positive
from bench.results import machine, show
from bench.updates import compare, table
from bench.workload import SIZES, Workload


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `prefix`."""
    parser.add_argument("--groups", nargs="+", type=int, default=[8, 16], help="rows of a group (default: 8 16)")
    parser.add_argument("--prompts", type=int, default=2, help="groups of the update (default: 2)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt (default: 256)")
    parser.add_argument("--response", type=int, default=256, help="tokens of a response (default: 256)")
    parser.add_argument("--size", choices=sorted(SIZES), default="21m", help="the model (default: 21m)")
    parser.add_argument("--plain", action="store_true", help="as a plain trainer does it, too")
    parser.add_argument("--repeats", type=int, default=2, help="measured updates after one to warm up (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/prefix.json"), help="for the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures every size of a group, prints tables, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a side failed.
    """
    console = Console()
    check_positive(arguments, "prompts", "prompt", "response", "repeats")
    if min(arguments.groups) < 2:
        raise ValueError(f"--groups {min(arguments.groups)}: a group of one shares nothing; give 2 or more")
    found: dict[str, Any] = {}
    for group in arguments.groups:
        workload = Workload(arguments.size, [[arguments.response] * group] * arguments.prompts, arguments.prompt)
        cap = f"actor.micro_batch_tokens={group * (arguments.prompt + arguments.response)}"  # a forward of whole rows
        sides = {
            "shared": ["rft", cap, "actor.packing=true", "actor.share_prefix=true"],
            "packed": ["rft", cap, "actor.packing=true", "actor.share_prefix=false"],
        }
        if arguments.plain:
            sides["plain"] = ["plain", str(group)]
        console.rule(f"groups of {group}")
        with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
            workload.write(Path(name))
            measured = compare(console, Path(name), sides, arguments.repeats)
        seconds = {name: side["median_s"] for name, side in measured.items()}
        found[str(group)] = {
            "workload": workload.plain(),
            "sides": measured,
            "ratio": {name: seconds[name] / seconds["shared"] for name in seconds},
        }
    lengths = f"{arguments.prompt} + {arguments.response} tokens"
    tables = [
        table(f"an update of {arguments.prompts} groups of {group} rows of {lengths}, median", numbers["sides"])
        for group, numbers in found.items()
    ]
    show(console, arguments.out, {"machine": machine(), "groups": found}, *tables)
