"""Subprocesses for measurements."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).resolve().parent


def environment(**variables: str) -> dict[str, str]:
    """The environment of this process, with this folder and rft on PYTHONPATH."""
    paths = [str(HERE.parent), str(HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables


def call(arguments: list[str], variables: dict[str, str] | None = None, **streams: Any) -> None:
    """Runs this Python on the terminal, or on the given streams. Raises a RuntimeError if it fails."""
    done = subprocess.run([sys.executable, *arguments], env=environment(**(variables or {})), **streams)
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments[:2])} ended with status {done.returncode}; see above")


def has_trl(console: Console, left_out: bool) -> bool:
    """True if TRL is installed and wanted; prints a message if it is not installed."""
    if left_out:
        console.print("TRL is left out")
    elif importlib.util.find_spec("trl") is None:
        missing = 'TRL is not installed, so there is no comparison: pip install -c constraints.txt -e ".[bench]"'
        console.print(missing, markup=False)
    else:
        return True
    return False
