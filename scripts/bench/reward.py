"""Section `reward`: calls per second of a rule in the process of the run, in worker processes, with and without faults,
isolated or not, and on a server; of the same rule in a plain pool of processes, which has no deadline, and in plain
requests; and of programs in the sandbox.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.options import check_positive
from bench.results import machine, show
from bench.reward_servers import KEY, REQUESTS, ROWS, plain_posts, serving
from bench.reward_yaml import build_reward, options
from rft.reward import REWARDS
from rft.reward.rules.gsm8k import gsm8k

NODE = {"method": "flexible", "markers": ["####"]}
FAULTS = 1000  # with faults one call of so many ends its worker, and one raises an error


@REWARDS.register("faulty", reads=("answer",))
def faulty(response: str, row: Mapping[str, Any], *, method: str, markers: list[str]) -> float:
    """The rule, but some calls end their process or raise an error."""
    number = int(str(row["answer"]).removeprefix("#### "))
    if number % FAULTS == 1:
        os._exit(1)
    if number % FAULTS == 2:
        raise ConnectionError("as if a server were gone")
    return plain((response, row))


def plain(job: tuple[str, Mapping[str, Any]]) -> float:
    """The rule on one response."""
    return gsm8k(*job, method="flexible", markers=["####"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `reward`."""
    parser.add_argument("--calls", type=int, default=20_000, help="responses to score (default: 20000)")
    parser.add_argument("--isolated", type=int, default=500, help="responses to score in sandboxes (default: 500)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="measured times after one to warm up (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmarks/reward.json"), help="for the numbers")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures every side, prints a table, and writes the numbers.

    Raises:
        ValueError: an option does not fit.
        RuntimeError: a side has lost or invented a score.
    """
    check_positive(arguments, "calls", "isolated", "workers", "repeats")
    texts = [f"so the answer is #### {number - number % 2}" for number in range(arguments.calls)]
    rows = [{"answer": f"#### {number}"} for number in range(arguments.calls)]
    expected = [float(number % 2 == 0) for number in range(arguments.calls)]
    few = min(arguments.isolated, arguments.calls)
    counts = {"sandbox": few, "programs": few}
    context = get_context("spawn")
    with ProcessPoolExecutor(arguments.workers, mp_context=context) as pool, serving(NODE) as address:
        sides: dict[str, Callable[[], list[float]]] = {
            "inline": scored("gsm8k", "inline", arguments.workers, texts, rows),
            "workers": scored("gsm8k", "process", arguments.workers, texts, rows),
            "sandbox": scored("gsm8k", "sandbox", arguments.workers, texts[:few], rows[:few]),
            "programs": programs(arguments.workers, rows[:few]),
            "workers, faults": scored("faulty", "process", arguments.workers, texts, rows),
            "plain pool": lambda: list(pool.map(plain, zip(texts, rows, strict=True))),
            "server": scored("gsm8k", "http", REQUESTS, texts, rows, [address]),
            "plain posts": plain_posts(address, texts, rows),
        }
        seconds = {
            name: measured(name, side, expected[: counts.get(name)], arguments.repeats) for name, side in sides.items()
        }
    rates = {name: counts.get(name, arguments.calls) / statistics.median(found) for name, found in seconds.items()}
    numbers = {
        "machine": machine(),
        "calls": arguments.calls,
        "isolated": few,
        "workers": arguments.workers,
        "seconds": seconds,
        "calls_per_s": rates,
        "ratio": {name: rate / rates["plain pool"] for name, rate in rates.items()},
        "server_to_plain_posts": rates["server"] / rates["plain posts"],
    }
    show(Console(), arguments.out, numbers, table(numbers))


def scored(
    name: str, kind: Any, workers: int, texts: list[str], rows: list[dict[str, Any]], addresses: list[str] | None = None
) -> Callable[[], list[float]]:
    """Scores all texts with a rule by its name; NaN where there is no score."""
    own: dict[str, Any] = {} if kind == "inline" else {"concurrency": workers, "deadline_s": 10.0}
    own |= {} if addresses is None else {"http": {"addresses": addresses, "token": KEY, "rows_per_request": ROWS}}
    term = {"name": name, "weight": 1.0, "call": {"workers": kind, "failed": "drop_row", **own}, **NODE}
    return of_term(name, term, texts, rows)


def programs(workers: int, rows: list[dict[str, Any]]) -> Callable[[], list[float]]:
    """Tests programs that read a number and print whether it is even."""
    term = options("terms/code.yaml")["code"]
    term |= {"program": "whole", "sandbox": term["sandbox"] | {"workers": workers}}
    program = "print(int(input()) % 2 == 0)"
    tests = [{"tests": [{"input": str(number), "output": "True"}]} for number in range(len(rows))]
    return of_term("code", term, [program] * len(rows), tests)


def of_term(
    name: str, term: Mapping[str, Any], texts: list[str], rows: list[dict[str, Any]]
) -> Callable[[], list[float]]:
    """Scores all texts with a term."""
    reward = build_reward({name: term}, name)
    return lambda: reward.score(texts, rows).total.tolist()


def measured(name: str, side: Callable[[], list[float]], expected: list[float], repeats: int) -> list[float]:
    """Seconds of each time.

    Raises:
        RuntimeError: a score is missing that no fault explains, or is wrong.
    """
    found = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        scores = side()
        found.append(time.perf_counter() - started)
        broken = {number for number in range(len(expected)) if number % FAULTS in (1, 2)} if "faults" in name else set()
        for number, (score, right) in enumerate(zip(scores, expected, strict=True)):
            if (score == score) == (number in broken) or (number not in broken and score != right):
                raise RuntimeError(f"{name}: response {number} has the score {score}, and {right} is right")
    return found[1:]


def table(numbers: dict[str, Any]) -> Table:
    """Calls per second of every side."""
    title = f"{numbers['calls']} calls of the rule gsm8k, {numbers['workers']} workers; requests of {ROWS} responses"
    made = Table(title=title)
    made.add_column("side")
    made.add_column("calls/s", justify="right")
    made.add_column("times the plain pool", justify="right")
    for name, rate in numbers["calls_per_s"].items():
        made.add_row(name, f"{rate:,.0f}", f"{numbers['ratio'][name]:.2f}")
    return made
