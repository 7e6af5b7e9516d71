"""Rows that a process of its own makes, so that what a package changes in its process does not reach the run."""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rft.data.rows.sources import check_text, require
from rft.sanitize import valid_text
from rft.waits import waiting
from rft.worker.child_process import ChildProcess

Rows = list[dict[str, Any]]
MAKE_S = 6 * 3600.0  # seconds; a package that takes longer to make its rows does not answer


def rows_of_child(module: str, *arguments: Any) -> Rows:
    """The rows that a module makes in a process of its own, with a fixed hash seed.

    Args:
        module: its name; run as a program it calls `make_rows`.
        arguments: of the function that makes the rows.

    Raises:
        ValueError: as the function raised it; or there are no rows after `MAKE_S` seconds.
        subprocess.CalledProcessError: the process ended otherwise.
    """
    with TemporaryDirectory() as folder:
        job, found = Path(folder, "job"), Path(folder, "rows")
        job.write_bytes(pickle.dumps(arguments))
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        command = [sys.executable, "-m", module, str(job), str(found)]
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        process = ChildProcess(command, stdin=subprocess.DEVNULL, env=environment)
        try:
            with waiting(f"the run waits for {module}, which makes rows"):
                status = process.wait(MAKE_S)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{module} has made no rows within {MAKE_S:g} s; make them once, into a file") from error
        finally:
            process.end(0)
        if status:
            raise subprocess.CalledProcessError(status, command)
        rows = pickle.loads(found.read_bytes())
    if isinstance(rows, ValueError):
        raise rows
    return list(valid_text(rows, module))


def check_rows(rows: Rows, required: Sequence[str], name: str, first: int, key: str) -> None:
    """Checks that every row has the required fields, and a prompt that is a text or messages.

    Args:
        name, first: of a row in messages, and the number of the first row.
        key: the yaml key of the rows.

    Raises:
        ValueError: a row does not; names it, the field and the key.
    """
    for number, row in enumerate(rows, first):
        where, cure = f"{name} {number}", f"see {key}"
        for field in required:
            require(row, field, where, cure)
        check_text(row["prompt"], "prompt", where, cure)


def make_rows(function: Callable[..., Rows]) -> None:
    """Calls the function with the arguments in the file that the command line names first, and writes its rows, or its
    ValueError, into the second."""
    job, found = map(Path, sys.argv[1:])
    rows: Rows | ValueError
    with contextlib.redirect_stdout(sys.stderr):  # some packages print
        try:
            rows = function(*pickle.loads(job.read_bytes()))
        except ValueError as error:
            rows = ValueError(str(error))
    found.write_bytes(pickle.dumps(rows))
