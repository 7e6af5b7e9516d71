"""What evaluations have in common: sets of rows, what was measured of each, and numbers of the whole and its parts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rft.data.rows.lazy import Rows
from rft.evaluation.estimators import with_error

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
SOURCE = "data_source"  # the field of a row that says which of the collected data sets it is of


@dataclass
class Measured(ABC):
    """A held-out set with what was found out about its rows.

    Attributes:
        rows: of the data set.
    """

    rows: Rows

    @abstractmethod
    def numbers(self, chosen: Sequence[int]) -> dict[str, list[float]]:
        """{number: its values} of the rows of these places; a number that they do not have is left out."""

    @abstractmethod
    def texts(self) -> list[dict[str, Any]]:
        """What was looked at, for people to read: `{prompt, response, score}` and more."""

    def parts(self) -> dict[str, dict[str, list[float]]]:
        """The values of the whole set, under the name "", and of each data source where there are several."""
        sources = [str(row.get(SOURCE, "other")) for row in self.rows]
        parts = {"": self.numbers(range(len(sources)))}
        for source in sorted(set(sources)) if len(set(sources)) > 1 else ():
            parts[source] = self.numbers([place for place, theirs in enumerate(sources) if theirs == source])
        return parts


class HeldOut(ABC):
    """Measures held-out sets."""

    @abstractmethod
    def measure(self, progress: Progress) -> Mapping[str, Measured]:
        """Every set by its name; the same on every rank.

        Args:
            progress: opens a progress bar (name, total) that is called with the number of rows that are done.
        """

    def run(self, progress: Progress) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
        """The numbers of `summary`, and the texts of every set. See `measure`."""
        sets = self.measure(progress)
        return summary(sets), {name: found.texts() for name, found in sets.items()}


def summary(sets: Mapping[str, Measured]) -> dict[str, float]:
    """`eval/<set>/<number>` and, where a set has rows of several sources, `eval/<set>/<source>/<number>`.

    The numbers are means; each but the length has a `_stderr`.
    """
    numbers: dict[str, float] = {}
    for name, found in sets.items():
        for source, values in found.parts().items():
            prefix = f"eval/{name}/{source}/" if source else f"eval/{name}/"
            for number, theirs in values.items():
                both = with_error(f"{prefix}{number}", theirs)
                numbers |= both if number != "length" else {f"{prefix}length": both[f"{prefix}length"]}
    return numbers
