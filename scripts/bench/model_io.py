"""Sections `load`, `export`, `sync` and `publish`: seconds and memory of moving a sharded model, and a whole one's.

`rft` reads the shards of each rank alone, writes file by file on rank 0, gives the engine `hf` of each rank the weights
in bfloat16, and writes the rows of each rank into files for servers, in bfloat16, hashed and read back. `whole` is the
same without: every rank calls `from_pretrained` in float32 and then shards the model; every rank gathers all tensors,
and rank 0 calls `save_pretrained`; the engine has all weights in float32; and for servers rank 0 writes the gathered
weights in bfloat16 by `save_file`, without reading them back.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from bench.options import check_positive
from bench.process import HERE, call
from bench.results import machine, ratio_table, show
from bench.workload import SIZES, Workload, equal

SIDES = ("rft", "whole")
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def add_options(parser: argparse.ArgumentParser, section: str) -> None:
    """The options of `load`, `export`, `sync` or `publish`."""
    parser.add_argument("--size", choices=sorted(SIZES), default="150m", help="the model (default: 150m)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="measured times after one to warm up (default: 3)")
    out = Path(f"outputs/benchmarks/{section}.json")
    parser.add_argument("--out", type=Path, default=out, help="where the numbers go")
    parser.set_defaults(run=partial(run, section))


def run(section: str, arguments: argparse.Namespace) -> None:
    """Measures both sides, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a process failed.
    """
    check_positive(arguments, "ranks", "repeats")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        parameters = Workload(arguments.size, equal(8, 8)).write(Path(name))
        store_in_bfloat16(Path(name) / "model" / "model.safetensors")
        side = [str(HERE / "model_io_side.py"), section, name, str(arguments.repeats)]
        call([*launch, *side], {"OMP_NUM_THREADS": "1", **RETURNS_MEMORY})
        measured = json.loads((Path(name) / f"{section}.json").read_text())
    model_mib = parameters * 4 / 2**20
    numbers = {"machine": machine(), "ranks": arguments.ranks, "model_mib": model_mib, **measured}
    show(Console(), arguments.out, numbers, table(section, numbers))


def store_in_bfloat16(file: Path) -> None:
    """Rounds the weights of a file, as most models are stored."""
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def table(section: str, numbers: dict[str, Any]) -> Table:
    """Both sides, and the ratios of `whole` to `rft`."""
    rows = {
        "seconds": "seconds",
        "memory that rank 0 takes (MiB)": "first_mib",
        "memory that the last rank takes (MiB)": "last_mib",
    }
    shown = ratio_table(f"{section} of a model on {numbers['ranks']} ranks, medians", rows, SIDES, numbers)
    weights = f"{numbers['model_mib']:.0f} MiB of float32 weights, which the file holds in bfloat16"
    shown.caption = f"{weights}; memory with the mapped parts of files"
    return shown
