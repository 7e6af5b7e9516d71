"""Does a long run grow? Trains the tool task for many steps and watches its processes.

python scripts/soak.py                                  # 2,000 steps, with tools, worker processes and checkpoints
python scripts/soak.py --steps 500 algorithm=gspo       # further overrides of the run

Prints, for the first and the last part of the steps, the smallest memory, descriptors, threads and children of the
run, and files in its temporary folder and in /dev/shm: what a checkpoint opens for a while is no growth. Ends with
status 1 where one of them grew: memory by more than a twentieth, the others at all. The run's caches and pools fill up
before the first part.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

RUN = (
    *("-cn", "tool_use", "warmup=none", "eval.every=500", "eval.at_start=false", "checkpoint.every=20"),
    *("batch.prompts=4", "algorithm.group_size=4", "reward.call.workers=process", "trajectories.every=10"),
)
FILL = 0.2  # share of the steps before the first part
PART = 0.3  # share of the steps in each part
MEMORY = 0.05  # growth of the memory that is none
SHARED = Path("/dev/shm")
POLL_S = 0.5


def main(arguments: list[str] | None = None) -> int:
    """Runs the script; returns its status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("overrides", nargs="*", help="of the run")
    chosen = parser.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        found = watch(Path(folder), chosen.steps, chosen.overrides, console)
    first, last = part(found, FILL, FILL + PART), part(found, 1 - PART, 1)
    table = Table("", "first part", "last part", title=f"{chosen.steps} steps, {len(found)} samples")
    for name in first:
        table.add_row(name, f"{first[name]:,}", f"{last[name]:,}")
    console.print(table)
    grown = [name for name in first if grew(name, first[name], last[name])]
    console.print(f"grew: {', '.join(grown)}" if grown else "nothing grew")
    return 1 if grown else 0


def watch(folder: Path, steps: int, overrides: list[str], console: Console) -> list[tuple[float, dict[str, int]]]:
    """Trains, and returns samples of (share of the steps, counts)."""
    temporary, run = folder / "tmp", folder / "run"
    temporary.mkdir()
    command = [sys.executable, "-m", "rft.main", *RUN, f"steps={steps}", f"output_dir={run}", *overrides]
    before, found, told = len(list(SHARED.iterdir())), list[tuple[float, dict[str, int]]](), 0.0
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=printed, env={**os.environ, "TMPDIR": str(temporary)}
        )
        while process.poll() is None:
            time.sleep(POLL_S)
            if (counts := sample(process.pid, temporary, before)) and (step := last_step(run / "metrics.jsonl")):
                found.append((step / steps, counts))
                if step / steps >= told + 0.1:
                    told = step / steps
                    console.print(f"step {step}: {counts}", highlight=False)
    if process.returncode != 0:
        raise SystemExit((folder / "printed").read_text()[-3000:])
    return found


def sample(pid: int, temporary: Path, before: int) -> dict[str, int]:
    """The counts of a process and all that it has started; empty if one has just ended."""
    try:
        processes = [Path("/proc", str(one)) for one in (pid, *children(pid))]
        memory = sum(
            int(line.split()[1])
            for path in processes
            for line in (path / "smaps_rollup").open()
            if line.startswith("Pss:")
        )
        return {
            "memory, MiB": memory // 1024,
            "descriptors": len(os.listdir(processes[0] / "fd")),
            "threads": len(os.listdir(processes[0] / "task")),
            "child processes": len(processes) - 1,
            "temporary files": sum(len(files) for _, _, files in os.walk(temporary)),
            "/dev/shm": len(list(SHARED.iterdir())) - before,
        }
    except OSError:
        return {}


def children(pid: int) -> Iterator[int]:
    """All processes that a process has started, and those that these have."""
    for task in Path("/proc", str(pid), "task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from children(int(child))


def last_step(metrics: Path) -> int:
    """The step of the last line of a metrics.jsonl; 0 if there is none."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 20_000))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if len(lines) > 1 else 0


def part(found: list[tuple[float, dict[str, int]]], start: float, end: float) -> dict[str, int]:
    """The smallest counts of the samples in a part of the run; those behind the last step are in none."""
    inside = [counts for share, counts in found if start <= share < end]
    if not inside:
        raise SystemExit("the run ended before it was watched; take more --steps")
    return {name: min(counts[name] for counts in inside) for name in inside[0]}


def grew(name: str, first: int, last: int) -> bool:
    """Whether a count of the last part is above that of the first one."""
    return last > first * (1 + MEMORY) if name.startswith("memory") else last > first


if __name__ == "__main__":
    sys.exit(main())
