"""The checks by name: what each needs and how long it may take."""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULES = ("machine", "training", "speed", "compiled", "decoding", "engines", "sharing")


class FailedError(Exception):
    """A check failed; the message is its reason."""


class TooFewGPUsError(Exception):
    """The machine has fewer GPUs than a check needs; the message names the number."""


@dataclass(frozen=True)
class Setting:
    """Where and how a check runs.

    Attributes:
        folder: of this check, new and empty; those of other checks are beside it.
        out: of the report, for files that stay.
        cpu: small sizes, on a CPU.
    """

    folder: Path
    out: Path
    cpu: bool


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
        seconds: after which its process is killed.
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

    def is_missing(self) -> bool:
        """True if the package of the check is not installed."""
        return self.package is not None and importlib.util.find_spec(self.package) is None


def all_checks() -> list[Check]:
    """Every check, in the order in which they run."""
    found: list[Check] = []
    for name in MODULES:
        found += importlib.import_module(f"gpu.{name}").checks()
    return sorted(found, key=lambda check: check.rank)
