"""Section `balance`: work per rank for several ways to assign rows to ranks, and the speed-up of two real ranks."""

import argparse
import heapq
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.options import check_positive
from bench.process import HERE, call
from bench.results import machine, show
from bench.workload import GROUP, SIZES, Workload, skewed
from rft.batch.balance import Cost, karmarkar_karp

Bins = list[list[int]]
# Floating-point operations of Qwen2.5-1.5B: 1.31e9 weights in the layers, 28 of width 1536, 151,936 tokens to know.
COST = Cost(linear=6 * 1.31e9, quadratic=6 * 28 * 1536, head=8 * 151_936 * 1536)


def as_sampled(costs: Sequence[float], parts: int) -> Bins:
    """Assigns groups to ranks in turn (round-robin), without balancing."""
    bins: Bins = [[] for _ in range(parts)]
    for row in range(len(costs)):
        bins[row // GROUP % parts].append(row)
    return bins


def greedy(costs: Sequence[float], parts: int) -> Bins:
    """Assigns the longest row first, each to the rank with the least work (greedy)."""
    bins: Bins = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for row in sorted(range(len(costs)), key=lambda row: -costs[row]):
        load, part = heapq.heappop(loads)
        bins[part].append(row)
        heapq.heappush(loads, (load + costs[row], part))
    return bins


def equal_counts(costs: Sequence[float], parts: int) -> Bins:
    """Equal numbers of rows on every rank, by Karmarkar-Karp: verl's `balance_batch` with rft's costs."""
    order = sorted(range(len(costs)), key=lambda row: -costs[row])
    heap = []
    for start in range(0, len(order), parts):
        bins = [(costs[row], [row]) for row in order[start : start + parts]]
        heap.append((bins[-1][0] - bins[0][0], start, bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, start, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        bins = [(a + b, rows + more) for (a, rows), (b, more) in zip(one, reversed(other), strict=True)]
        bins.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], start, bins))
    return [rows for _, rows in heap[0][2]]


ASSIGNMENTS: dict[str, Callable[[Sequence[float], int], Bins]] = {
    "as sampled": as_sampled,
    "equal counts (verl)": equal_counts,
    "greedy": greedy,
    "rft": karmarkar_karp,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `balance`."""
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 32], help="of the simulation (default: 8 32)")
    parser.add_argument("--rank-rows", type=int, default=64, help="rows of each of them (default: 64)")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest of them (default: 8192)")
    parser.add_argument("--plan", nargs=2, type=int, default=[4096, 64], metavar=("ROWS", "RANKS"), help="timed")
    parser.add_argument("--size", choices=sorted(SIZES), default="21m", help="the model of two real ranks (21m)")
    parser.add_argument("--rows", type=int, default=64, help="rows of the two ranks together (default: 64)")
    parser.add_argument("--longest-row", type=int, default=256, help="tokens of the longest of them (default: 256)")
    parser.add_argument("--repeats", type=int, default=2, help="measured updates after one to warm up (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/balance.json"), help="for the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Simulates, measures, prints tables, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a run failed.
    """
    console = Console()
    for name in ("rank_rows", "rows"):
        if vars(arguments)[name] < 2 * GROUP or vars(arguments)[name] % (2 * GROUP):
            raise ValueError(f"--{name.replace('_', '-')} {vars(arguments)[name]}: give a multiple of {2 * GROUP}")
    check_positive(arguments, "repeats")
    rows, parts = arguments.plan
    numbers = {
        "machine": machine(),
        "lengths": {"rank_rows": arguments.rank_rows, "longest": arguments.longest},
        "imbalance": {
            str(ranks): imbalances(skewed(ranks * arguments.rank_rows, arguments.longest), ranks)
            for ranks in arguments.ranks
        },
        "planning": {"rows": rows, "ranks": parts, "seconds": planning(skewed(rows, arguments.longest), parts)},
    }
    workload = Workload(arguments.size, skewed(arguments.rows, arguments.longest_row))
    with tempfile.TemporaryDirectory(prefix="rft-benchmark-") as name:
        folder = Path(name)
        workload.write(folder)
        updates = {}
        for moves in (False, True):
            console.rule(f"two ranks, batch.balance={str(moves).lower()}")
            updates[str(moves).lower()] = update(folder, workload, 1 + arguments.repeats, moves)
    numbers["update"] = updates | {"workload": workload.plain()}
    numbers["update"]["ratio"] = updates["false"]["median_s"] / updates["true"]["median_s"]
    show(console, arguments.out, numbers, simulated(numbers), measured(numbers["update"]))


def costs_of(lengths: list[list[int]]) -> list[float]:
    """The predicted work of each row."""
    return [n * (COST.linear + COST.head + COST.quadratic * n) for group in lengths for n in group]


def imbalances(lengths: list[list[int]], ranks: int) -> dict[str, float]:
    """The largest work of a rank over the mean, for each way to assign rows to ranks."""
    costs = costs_of(lengths)
    found = {}
    for name, assign in ASSIGNMENTS.items():
        bins = assign(costs, ranks)
        assert sorted(row for rows in bins for row in rows) == list(range(len(costs))) and len(bins) == ranks
        found[name] = max(sum(costs[row] for row in rows) for rows in bins) * ranks / sum(costs)
    return found


def planning(lengths: list[list[int]], ranks: int) -> dict[str, float]:
    """Seconds to assign rows to ranks, median of 3."""
    costs = costs_of(lengths)
    found = {}
    for name, assign in ASSIGNMENTS.items():
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            assign(costs, ranks)
            seconds.append(time.perf_counter() - started)
        found[name] = statistics.median(seconds)
    return found


def update(folder: Path, workload: Workload, steps: int, moves: bool) -> dict[str, Any]:
    """The main job on two ranks with one thread each: seconds of its updates, and the balance of their work."""
    run = folder / f"balance_{str(moves).lower()}"
    overrides = [f"rollout.engine.workload={folder}", f"output_dir={run}", f"batch.balance={str(moves).lower()}"]
    overrides += [f"batch.prompts={len(workload.lengths)}", f"steps={steps}"]
    overrides += [f"rollout.max_new_tokens={workload.longest}", "strategy.device=cpu"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    call([*launch, "-m", "rft.main", "-cd", str(HERE), "-cn", "step", *overrides], {"OMP_NUM_THREADS": "1"})
    lines = (run / "metrics.jsonl").read_text().splitlines()
    logged = [row for row in map(json.loads, lines) if row["step"] > 0]
    return {
        "seconds": [row["time/update_s"] for row in logged],
        "median_s": statistics.median(row["time/update_s"] for row in logged[1:]),
        "before": logged[-1]["balance/before"],
        "after": logged[-1]["balance/after"],
    }


def simulated(numbers: dict[str, Any]) -> Table:
    """The imbalances and the seconds of planning, for each way to assign rows to ranks."""
    planning = numbers["planning"]
    shown = Table(title="the largest predicted work of a rank over the mean (1 is perfect), simulated")
    shown.add_column("")
    for ranks in numbers["imbalance"]:
        shown.add_column(f"{ranks} ranks", justify="right")
        shown.add_column("/ rft", justify="right")
    shown.add_column("planning (s)", justify="right")
    for name in ASSIGNMENTS:
        cells = []
        for found in numbers["imbalance"].values():
            cells += [f"{found[name]:.4f}", f"{found[name] / found['rft']:.3f}"]
        shown.add_row(name, *cells, f"{planning['seconds'][name]:.4f}")
    lengths = numbers["lengths"]
    shown.caption = (
        f"{lengths['rank_rows']} rows a rank, log-normal lengths of at most {lengths['longest']} tokens; planning is "
        f"for {planning['rows']} rows and {planning['ranks']} ranks"
    )
    return shown


def measured(update: dict[str, Any]) -> Table:
    """The updates of the two ranks."""
    shown = Table(title="an update of two ranks with one thread each, median")
    for title in ("batch.balance", "seconds", "largest over mean, before", "after"):
        shown.add_column(title, justify="right")
    for moves in ("false", "true"):
        found = update[moves]
        shown.add_row(moves, f"{found['median_s']:.3f}", f"{found['before']:.3f}", f"{found['after']:.3f}")
    shown.caption = f"{update['ratio']:.2f} times as fast with balance; {update['workload']['rows']} rows"
    return shown
