"""Kills runs of one config, continues each by the same command, and compares it with the run that was not killed.

    python kills.py FOLDER

FOLDER/config.json is the resolved config of a run in the folder `run` below FOLDER, and FOLDER/trials.json a list of
trials. A trial is a list of kills, each of one process of the run; a process after the last kill ends the run. A kill
is a place, [module, function, number of the call, "before" or "after"], or a share of the CPU seconds of the whole run.

FOLDER/whole becomes the run that was not killed, and FOLDER/outcomes.json has for each trial the last step that was
logged before each kill (null if the process ended before it), and the files of the run that differ at its end. A run
that differs stays in FOLDER. Processes are forks of this one, which has imported everything and computed nothing.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.models.qwen3 import modeling_qwen3

from rft.report import run_page
from rft.setup.assembly import Job

assert modeling_qwen3 and run_page  # imported once, for all forks
CLOCK = ("time/", "throughput/", "memory/")
OF_THE_PROCESS = ("run.lock", "report.html", "MANIFEST.json")  # of these only the names are compared


def without_clock(node: Any) -> Any:
    """JSON without the metrics that a second run cannot repeat."""
    if isinstance(node, dict):
        return {key: without_clock(value) for key, value in node.items() if not key.startswith(CLOCK)}
    return [without_clock(value) for value in node] if isinstance(node, list) else node


def content(path: Path) -> Any:
    """What two runs must share of a file: JSON without the clock, tensors in any order, otherwise the hash."""
    if path.name in OF_THE_PROCESS:
        return None
    if path.suffix == ".safetensors":
        return {name: (str(found.dtype), found.tolist()) for name, found in load_file(path).items()}
    if path.suffix in (".json", ".jsonl"):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        return [without_clock(json.loads(line)) for line in lines]
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(run: Path) -> dict[str, Any]:
    """Every file and link of a run folder by its name."""
    return {
        path.relative_to(run).as_posix(): os.readlink(path) if path.is_symlink() else content(path)
        for path in sorted(run.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def kill_at(module: str, name: str, call: int, when: str) -> None:
    """Kills this process before or after a call of a function, or of a method `Class.name`."""
    *classes, function = name.split(".")
    owner: Any = import_module(module)
    for one in classes:
        owner = vars(owner)[one]
    whole: Callable[..., Any] = vars(owner)[function]
    count = 0

    def watched(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if (count, when) == (call, "before"):
            os.kill(os.getpid(), signal.SIGKILL)
        found = whole(*arguments, **options)
        if (count, when) == (call, "after"):
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(owner, function, watched)


def fit(config: dict[str, Any], kill: Any = None, whole_s: float = 0.0) -> None:
    """The command in a process: the whole run, up to the kill."""
    torch.set_num_threads(1)
    if isinstance(kill, float):
        signal.setitimer(signal.ITIMER_PROF, kill * whole_s)  # at SIGPROF the system ends the process at once, too
    elif kill is not None:
        kill_at(*kill)
    Job(config).fit("")


def forked(work: Callable[[], None]) -> tuple[bool, float]:
    """Runs a function in a fork of this process; True where it was killed before its end, and its CPU seconds."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status, usage = os.wait4(child, 0)
    status = os.waitstatus_to_exitcode(status)
    assert status in (0, -signal.SIGKILL, -signal.SIGPROF), f"the run failed with status {status}"
    return status != 0, usage.ru_utime + usage.ru_stime


def logged(run: Path) -> int:
    """The last step in the metrics of a run; -1 without one."""
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


def main() -> None:
    """Makes the whole run, then every trial."""
    os.chdir(sys.argv[1])
    config, run = json.loads(Path("config.json").read_text()), Path("run")
    forked(partial(fit, config))
    first = contents(run)
    shutil.rmtree(run)
    _, whole_s = forked(partial(fit, config))
    whole = contents(run.rename("whole"))
    assert whole == first, "the run cannot be repeated"
    outcomes = []
    for number, kills in enumerate(json.loads(Path("trials.json").read_text())):
        steps = [logged(run) if forked(partial(fit, config, kill, whole_s))[0] else None for kill in kills]
        if not (run / "result.json").exists():
            forked(partial(fit, config))
        found = contents(run)
        different = [name for name in {**whole, **found} if whole.get(name, "") != found.get(name, "")]
        outcomes.append({"steps": steps, "different": different})
        if different:
            run.rename(f"trial_{number}")
        else:
            shutil.rmtree(run)
    Path("outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
