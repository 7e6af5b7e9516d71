"""Writes a checkpoint again and again, and kills the process before its n-th file operation, for every n.

python killed_writer.py FOLDER

Each time a fork of this process has checkpoints of steps 1 and 2, keeps two, and writes that of step 3; another fork
reads what is left. Writes FOLDER/outcomes.json.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from rft.distributed import start
from rft.train.checkpoint.checkpoints import Checkpoints
from rft.train.checkpoint.options import CheckpointOptions

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.truncate"}
OPTIONS = CheckpointOptions(
    every=1, keep_last=2, keep_best=0, keep_every=0, export_every=1, fallback=None, export_dtype="auto"
)


def save_model(folder: Path, _: torch.dtype | None) -> None:
    """Writes an export of two files."""
    folder.mkdir()
    for name in ("config.json", "model.txt"):
        (folder / name).write_text(name)


def write(checkpoints: Checkpoints, step: int) -> None:
    """Writes the checkpoint of a step, until it is on the disk."""
    checkpoints.write(step, {"step": step, "w": torch.full((3,), float(step))}, save_model, None, False)
    assert checkpoints.wait()


def kill_before(number: int) -> None:
    """Kills this process before its n-th operation that changes a folder or opens a file for writing."""
    count = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal count
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        syncs = event == "open" and isinstance(arguments[0], str) and ".partial" in arguments[0]
        if event in CHANGES or writes or syncs:
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(watch)


def write_and_die(folder: Path, number: int) -> None:
    """Writes three checkpoints; the last one is cut short."""
    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder, OPTIONS, start("cpu"), "accuracy", lambda _: None)
    write(checkpoints, 1)
    write(checkpoints, 2)
    kill_before(number)
    write(checkpoints, 3)


def read(folder: Path, note: Path) -> None:
    """Writes what a new process reads into a file."""
    torch.set_num_threads(1)
    warnings: list[str] = []
    saved = Checkpoints(folder, OPTIONS, start("cpu"), "accuracy", warnings.append).read()
    assert saved is not None
    kept = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))
    found = {"step": saved["step"], "values": saved["w"].tolist(), "warnings": warnings, "kept": kept}
    note.write_text(json.dumps(found))


def in_fork(work: Callable[[], None]) -> int:
    """Runs a function in a fork of this process and returns its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Kills before every operation until a process is not killed any more."""
    root, outcomes, killed = Path(sys.argv[1]), [], True
    while killed:
        folder, note = root / str(len(outcomes)), root / "note.json"
        folder.mkdir()
        status = in_fork(partial(write_and_die, folder, len(outcomes)))
        assert status in (0, -signal.SIGKILL), status
        killed = status != 0
        assert in_fork(partial(read, folder, note)) == 0
        outcomes.append({"killed": killed, **json.loads(note.read_text())})
    (root / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
