"""Runs the commands on one checkout and reads their output."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from comparison.runs import INPUT, Run

CLOCK = ("time/", "throughput/", "memory/", "episode/environment_s")  # metrics that differ from run to run
LONGEST = 300.0  # seconds until a command times out
LOG = "output.txt"  # stdout and stderr of a command


class Recorder:
    """Runs commands on a checkout and keeps their numbers.

    Args:
        checkout: the root of the clone.
        folder: the folder for the output of the runs.
        tensors: the folder for the values of the tensors, one file per run.
    """

    def __init__(self, checkout: Path, folder: Path, tensors: Path) -> None:
        self.checkout = checkout
        self.folder = folder
        self.tensors = tensors
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("RFT_")} | {
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.process_options: dict[str, Any] = {
            "env": self.environment,
            "cwd": checkout,
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.STDOUT,
        }

    def record_all(self, runs: list[Run], jobs: int, log: Callable[[str], None]) -> dict[str, Any]:
        """Records runs: those of one process concurrently, then those of several ranks one after another.

        Args:
            runs: the runs, each after the run that it needs.
            jobs: number of concurrent processes.
            log: prints a line for every finished run.
        """
        self.check_package()
        done: dict[str, Any] = {}

        def one(run: Run) -> None:
            try:
                done[run.name] = self.record(run)
                log(f"{run.name}: {done[run.name]['seconds']:.1f} s")
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                log(f"{run.name}: FAILED: {error}")

        alone = [run for run in runs if run.ranks == 1]
        first = [run for run in alone if run.needs is None]
        for part in (first, [run for run in alone if run not in first]):
            with ThreadPoolExecutor(jobs) as pool:
                list(pool.map(one, part))
        for run in runs:
            if run.ranks > 1:
                one(run)
        return {
            "checkout": str(self.checkout),
            "commit": self.commit(),
            "torch": importlib.metadata.version("torch"),
            "runs": {run.name: done[run.name] for run in runs if run.name in done},
            "failed": [run.name for run in runs if run.name not in done],
        }

    def check_package(self) -> None:
        """Raises RuntimeError if `rft` would not be imported from the checkout."""
        command = [sys.executable, "-c", "import rft; print(rft.__file__)"]
        found = subprocess.run(
            command, env=self.environment, cwd=self.checkout, capture_output=True, text=True, check=False
        )
        if not Path(found.stdout.strip()).is_relative_to(self.checkout):
            raise RuntimeError(f"--checkout {self.checkout}: rft is imported from {found.stdout.strip()}{found.stderr}")

    def commit(self) -> str:
        """Returns the commit of the checkout, with a `+` if tracked files are changed."""
        git = ["git", "-C", str(self.checkout)]
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False)
        return commit.stdout.strip() + ("+" if changed.returncode else "")

    def output(self, name: str) -> Path:
        """Returns the output folder of a run."""
        return self.folder / name / "run"

    def command(self, run: Run) -> list[str]:
        """Returns the command line of a run."""
        start = [sys.executable]
        if run.ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
        paths = [
            re.sub(r"<run:(\w+)>", lambda found: str(self.output(found[1])), text).replace(
                INPUT, str(self.folder / run.name / "input.jsonl")
            )
            for text in run.overrides
        ]
        return [*start, "-m", "rft.main", f"output_dir={self.output(run.name)}", *paths]

    def record(self, run: Run) -> dict[str, Any]:
        """Runs one command (a killed one twice) and reads its output.

        Raises:
            RuntimeError: the command failed, or it ended before it could be killed.
        """
        own, output = self.folder / run.name, self.output(run.name)
        own.mkdir(parents=True)
        if run.within and run.needs is not None:
            shutil.copytree(self.output(run.needs), output, symlinks=True)
        if run.input is not None:
            (own / "input.jsonl").write_text(run.input)
        started = time.monotonic()
        command = self.command(run)
        if run.killed:
            self.kill(run, command)
        with (own / LOG).open("ab") as log:
            ended = subprocess.run(command, stdout=log, timeout=LONGEST, check=False, **self.process_options)
        seconds = time.monotonic() - started
        if ended.returncode != 0:
            raise RuntimeError(f"{run.name} failed:\n{' '.join(command)}\n{(own / LOG).read_text()[-3000:]}")
        return {"ranks": run.ranks, "seconds": round(seconds, 1), "command": command[1:], **self.read(run)}

    def kill(self, run: Run, command: list[str]) -> None:
        """Starts the command and kills it with SIGKILL after a checkpoint and two steps of its stage `train`."""
        output = self.output(run.name)
        with (output.parent / LOG).open("wb") as log:
            process = subprocess.Popen(command, stdout=log, start_new_session=True, **self.process_options)
        deadline = time.monotonic() + LONGEST
        while process.poll() is None and time.monotonic() < deadline and not trains(output):
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait()
        if process.returncode != -signal.SIGKILL or (output / "result.json").exists():
            raise RuntimeError(f"{run.name}: the run ended before it was killed: {output.parent / LOG}")

    def read(self, run: Run) -> dict[str, Any]:
        """Returns the numbers, the digests of the tensors and the files of a finished run."""
        output = self.output(run.name)
        found: dict[str, Any] = {"steps": {}, "tensors": {}, "files": {}}
        if not run.within:
            found["steps"] = read_steps(output / "metrics.jsonl")
            tensors = read_tensors(output / "checkpoints" / "latest")
            found["tensors"] = {name: digest(tensor) for name, tensor in tensors.items()}
            self.tensors.mkdir(parents=True, exist_ok=True)
            save_file(tensors, self.tensors / f"{run.name}.safetensors")
        if run.ranks == 1:
            for pattern in run.files:
                for path in sorted(output.glob(pattern)):
                    found["files"][str(path.relative_to(output))] = read_file(path, str(self.folder))
        return found


def trains(output: Path) -> bool:
    """Returns whether the run has logged two steps of its stage `train` and has written a checkpoint."""
    metrics = output / "metrics.jsonl"
    return (
        metrics.exists()
        and metrics.read_text().count('"stage": "train"') >= 2
        and (output / "checkpoints" / "latest").exists()
    )


def read_steps(path: Path) -> dict[str, dict[str, float]]:
    """Returns the metrics of each step, without those of `CLOCK`."""
    steps: dict[str, dict[str, float]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        assert str(row["step"]) not in steps, f"{path} has step {row['step']} twice"
        steps[str(row["step"])] = {
            name: value
            for name, value in row.items()
            if isinstance(value, int | float) and not name.startswith(CLOCK)
        }  # fmt: skip
    return steps


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint of one process: those of the state, and those of the model, by file."""
    found = {}
    for path in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[f"{path.relative_to(checkpoint)}:{name}"] = tensor
    return found


def digest(tensor: Tensor) -> str:
    """Returns a sha256 of type, shape and bytes."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    return hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + raw).hexdigest()


def read_file(path: Path, folder: str) -> dict[str, Any]:
    """Returns the digest and the numbers of a json or jsonl file; both are independent of the order of keys.

    Args:
        path: the path of the file.
        folder: the temporary folder, whose name is removed before hashing.
    """
    text = path.read_text().replace(folder, "<folder>")
    rows = [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    if path.name == "result.json":
        rows = [{name: value for name, value in row.items() if not name.startswith(CLOCK)} for row in rows]
    canonical = "\n".join(json.dumps(row, sort_keys=True, ensure_ascii=False) for row in rows)
    return {
        "sha256": hashlib.sha256(canonical.encode()).hexdigest(),
        "numbers": [number for row in rows for number in numbers_within(row)],
    }


def numbers_within(node: Any) -> Iterator[float]:
    """Yields the numbers of nested containers, with sorted keys."""
    if isinstance(node, bool):
        return
    if isinstance(node, int | float):
        yield node
    elif isinstance(node, list):
        for child in node:
            yield from numbers_within(child)
    elif isinstance(node, dict):
        for name in sorted(node):
            yield from numbers_within(node[name])
