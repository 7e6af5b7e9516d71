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

Rows = list[dict[str, Any]]


def rows_of_child(module: str, *arguments: Any) -> Rows:
    """The rows that a module makes in a process of its own, with a fixed hash seed.

    Args:
        module: its name; run as a program it calls `make_rows`.
        arguments: of the function that makes the rows.

    Raises:
        ValueError: as the function raised it.
        subprocess.CalledProcessError: the process ended otherwise.
    """
    with TemporaryDirectory() as folder:
        job, found = Path(folder, "job"), Path(folder, "rows")
        job.write_bytes(pickle.dumps(arguments))
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        subprocess.run(
            [sys.executable, "-m", module, str(job), str(found)],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            check=True,
        )
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
