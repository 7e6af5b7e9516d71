"""Section `logprob`: log-probabilities from hidden states, forward and backward: rft, plain PyTorch, TRL, and Liger."""

import argparse
import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.options import check_positive
from bench.process import call, has_trl
from bench.results import machine, show

LIVE = {False: 3, True: 5}  # float32 tensors (tokens, vocabulary) at the plain way's peak, without and with entropy


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `logprob`."""
    parser.add_argument("--tokens", type=int, default=8192, help="(default: 8192)")
    parser.add_argument("--vocab", type=int, default=151936, help="(default: 151936, Qwen's)")
    parser.add_argument("--hidden", type=int, default=896, help="size of a hidden state (default: 896)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(default: float32)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
    parser.add_argument("--entropy", action="store_true", help="the loss takes the entropy too")
    parser.add_argument("--repeats", type=int, default=1, help="measured runs, the best counts (default: 1)")
    parser.add_argument("--rft-only", action="store_true", help="leaves TRL and Liger out")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/logprob.json"), help="for the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures on the device, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit, or the plain way does not fit into memory.
        RuntimeError: a side failed.
    """
    console = Console()
    names = ("tokens", "vocab", "hidden", "repeats")
    check_positive(arguments, *names)
    options = {name: vars(arguments)[name] for name in (*names, "dtype", "entropy", "device")}
    check_memory(arguments.tokens, arguments.vocab, arguments.entropy, arguments.device)
    ways = ["rft", *(["rft_compiled"] if can_compile(console) else []), "plain"]
    if has_trl(console, arguments.rft_only):
        ways += ["trl_fused", "trl_whole"]
    if has_liger(console, arguments.rft_only, arguments.device):
        ways.append("liger")
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        folder = Path(name)
        for way in ways:
            call(["-m", "bench.logprob_side", way, str(folder), json.dumps(options)])
        sides = {way: json.loads((folder / f"{way}.json").read_text()) for way in ways}
        gradients = {way: torch.load(folder / f"{way}.pt", weights_only=True) for way in ways}
    packages = {"trl_fused": "trl", "liger": "liger-kernel"}
    versions = machine(*(package for way, package in packages.items() if way in sides))
    plain, exact = summary(sides["plain"]), gradients["plain"]
    numbers: dict[str, Any] = {"workload": options, "machine": versions, "sides": {}}
    for way, side in sides.items():
        found = summary(side)
        ratio = {what: value / plain[what] for what, value in found.items()}
        difference = max(off(gradients[way][leaf], exact[leaf]) for leaf in exact)
        numbers["sides"][way] = found | {"ratio": ratio, "gradient_difference": difference}
    show(console, arguments.out, numbers, table(numbers))


def can_compile(console: Console) -> bool:
    """True if torch.compile finds a compiler for the processor; prints a message if not."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        console.print("rft compiled is left out: torch.compile needs a C++ compiler, and this machine has none")
        return False
    return True


def has_liger(console: Console, left_out: bool, device: str) -> bool:
    """True if Liger is installed and wanted; prints what is measured of it."""
    if left_out:
        console.print("Liger is left out")
    elif importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("triton") is None:
        console.print('Liger is left out: pip install -c constraints.txt -e ".[liger]" for its fallback', markup=False)
    else:
        if device == "cpu":
            console.print("Liger's kernels need a GPU: on the processor its fallback in PyTorch runs")
        return True
    return False


def check_memory(tokens: int, vocabulary: int, entropy: bool, device: str) -> None:
    """Raises a ValueError if all logits, which plain PyTorch needs, do not fit into the memory of the device."""
    needed = 4 * tokens * vocabulary * LIVE[entropy]
    if device == "cuda":
        available, _ = torch.cuda.mem_get_info()
    else:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    if needed > 0.9 * available:  # the rest is for the head, its gradient, and the process
        raise ValueError(
            f"--tokens {tokens}: the plain way needs {needed / 2**30:.1f} GiB for logits, but "
            f"{available / 2**30:.1f} are available; give fewer"
        )


def summary(side: dict[str, Any]) -> dict[str, float]:
    """The best times, and the peak memory in bytes, without and with inputs and gradients, which every way needs."""
    return {
        "first": side["first"],
        "seconds": min(side["seconds"]),
        "cpu": min(side["cpu"]),
        "above": side["grown"] - side["gradients"],
        "total": side["grown"] + side["inputs"],
    }


def off(gradient: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference over the largest entry."""
    return float((gradient - other).abs().max() / other.abs().max())


def table(numbers: dict[str, Any]) -> Table:
    """The table of the numbers."""
    workload = numbers["workload"]
    shape = f"{workload['tokens']} tokens x {workload['vocab']} x {workload['hidden']}"
    shape += f", {workload['dtype']}, {workload['device']}"
    shown = Table(title=f"log-probabilities{' and entropy' * workload['entropy']}, forward and backward, {shape}")
    shown.add_column("")
    for title in (
        "first call",
        "seconds",
        "of the processor",
        "peak (GiB)",
        "with inputs and gradients",
        "gradient off",
    ):
        shown.add_column(title, justify="right")
    titles = {
        "rft": "rft",
        "rft_compiled": "rft, compiled",
        "plain": "plain",
        "trl_fused": "TRL, fused head",
        "trl_whole": "TRL, whole logits",
        "liger": "Liger",
    }
    for way, side in numbers["sides"].items():
        cells = [f"{side['first']:.2f}"]
        cells += [f"{side[what]:.2f} ({side['ratio'][what]:.2f})" for what in ("seconds", "cpu")]
        cells += [f"{side[what] / 2**30:.2f} ({side['ratio'][what]:.1%})" for what in ("above", "total")]
        shown.add_row(titles[way], *cells, f"{side['gradient_difference']:.0e}")
    shown.caption = (
        "in brackets: of plain; the first call is of 64 tokens, or compiles for all of them; "
        "the peak is what inputs and their gradients do not take, then with them; the last "
        "column is the largest difference to plain's gradients over their largest entry"
    )
    return shown
