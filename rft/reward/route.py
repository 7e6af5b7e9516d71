"""Which terms score a row: all of them, or those of its data source, see `rft.reward.source_routes`."""

from collections.abc import Mapping, Sequence
from typing import Any

SOURCE = "data_source"  # the field of a row that names the data set it was collected from


class Routes:
    """The terms of a row: all of them.

    Args:
        terms: names of all terms.
        accuracy: the term whose value is the accuracy; of a row that it does not score, the first of its terms is.
    """

    def __init__(self, terms: Sequence[str], accuracy: str) -> None:
        self._terms = tuple(terms)
        self._accuracy = accuracy

    def every(self) -> list[tuple[str, ...]]:
        """The terms of every route."""
        return [self._terms]

    def terms(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The terms that score a row."""
        return self._terms

    def accuracy(self, row: Mapping[str, Any]) -> str:
        """The term whose value is the accuracy of a row."""
        return self._main(self.terms(row))

    def accuracies(self) -> set[str]:
        """The terms whose values are the accuracy of some row."""
        return {self._main(names) for names in self.every()}

    def _main(self, names: tuple[str, ...]) -> str:
        return self._accuracy if self._accuracy in names else names[0]
