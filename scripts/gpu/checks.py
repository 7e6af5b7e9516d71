"""The checks by name: what each needs and how long it takes."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

APART_VARIABLE = "GPU_CHECK_APART"  # names a folder of packages; a check sees the one that it needs
MODULES = ("machine", "kernels", "updates", "decoding", "compiled", "training", "engines", "sharing")


class FailedError(Exception):
    """A check failed; the message is its reason."""


class TooFewGPUsError(Exception):
    """The machine has fewer GPUs than a check needs; the message names the number."""


@dataclass(frozen=True)
class Setting:
    """Where and how a check runs.

    Attributes:
        folder: of this check, new and empty; those of other checks are beside it. Nothing of it stays.
        cpu: small sizes, on a CPU.
        shared: what the checks of one process make for each other, by name.
    """

    folder: Path
    cpu: bool
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What a check found.

    Attributes:
        figure: one line for the report.
        numbers: for the JSON, and the charts of the page.
        text: a longer text, such as the table of a profile.
    """

    figure: str
    numbers: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: `<kind>` or `<kind>:<variant>`.
        title: what it shows.
        run: raises an error if the check fails.
        rank: checks run in this order, the most valuable first.
        seconds: that it takes on one H200, by estimate until it has run there.
        cuda: it needs a GPU.
        package: that must be importable, or None.
    """

    name: str
    title: str
    run: Callable[[Setting], Found]
    rank: int
    seconds: float
    cuda: bool = False
    package: str | None = None

    @property
    def limit(self) -> float:
        """Seconds after which its process is killed."""
        return 3 * self.seconds + 30

    def refusal(self, cpu: bool) -> dict[str, str]:
        """The status and the reason if it cannot run here; empty if it can."""
        if self.cuda and cpu:
            return {"status": "needs a GPU", "reason": "--cpu"}
        package = self.package
        if package is not None and importlib.util.find_spec(package) is None and not apart_folder(package).is_dir():
            return {"status": "not installed", "reason": f"the package {self.package}"}
        return {}


def apart_folder(package: str) -> Path:
    """The folder of a package that lies apart from the others, if there is one."""
    return Path(os.environ.get(APART_VARIABLE, "no such folder")) / package


@contextmanager
def importable(package: str | None) -> Iterator[None]:
    """A package that lies apart can be imported in the block, and in processes that it starts."""
    folder = None if package is None else str(apart_folder(package))
    if folder is None or not Path(folder).is_dir():
        yield
        return
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [before, folder]))
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        os.environ["PYTHONPATH"] = before


def all_checks() -> list[Check]:
    """Every check, in the order in which they run."""
    found: list[Check] = []
    for name in MODULES:
        found += importlib.import_module(f"gpu.{name}").checks()
    return sorted(found, key=lambda check: check.rank)
