"""Rows that a process of its own makes, so that what a package changes in its process does not reach the run."""

import asyncio
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rft.data.rows.sources import check_text, require
from rft.sanitize import valid_text
from rft.waits import waiting
from rft.worker.worker import ForkServer, Work, WorkerLost

Rows = list[dict[str, Any]]
MAKE_S = 6 * 3600.0  # seconds; a package that takes longer to make its rows does not answer


def rows_of_child(function: Callable[..., Rows], *arguments: Any) -> Rows:
    """The rows that a function of a module makes in a process of its own, with a fixed hash seed.

    Args:
        function: makes the rows.
        arguments: of the function.

    Raises:
        ValueError: as the function raised it; or there are no rows after `MAKE_S` seconds.
        OSError: the process ended otherwise.
    """
    module = function.__module__
    server = ForkServer(f"the process of {module}", work_of, (function,), {"PYTHONHASHSEED": "0"}, start_s=MAKE_S)
    try:
        with waiting(f"the run waits for {module}, which makes rows"):
            rows = pickle.loads(asyncio.run(server.fork().call(pickle.dumps(arguments), MAKE_S)))
    except TimeoutError as error:
        raise _too_late(module) from error
    except WorkerLost as error:
        if error.reason == "deadline":
            raise _too_late(module) from error
        raise OSError(f"{module} has made no rows: {error}; see its error above") from error
    finally:
        server.close()
    if isinstance(rows, ValueError):
        raise rows
    return list(valid_text(rows, module))


def _too_late(module: str) -> ValueError:
    return ValueError(f"{module} has made no rows within {MAKE_S:g} s; make them once, into a file")


def work_of(function: Callable[..., Rows]) -> Work:
    """A worker answers with the pickle of the rows of a function, or of its ValueError."""
    return partial(_pickled_rows, function)


def _pickled_rows(function: Callable[..., Rows], *arguments: Any) -> bytes:
    try:
        return pickle.dumps(function(*arguments))
    except ValueError as error:
        return pickle.dumps(ValueError(str(error)))


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
