"""Which terms score a row: all of them, or those of its data source."""

from collections.abc import Mapping, Sequence
from typing import Any

from rft.errors import did_you_mean

SOURCE = "data_source"  # the field of a row that names the data set it was collected from
OTHER = "other"  # the entry of rows whose source has none


class Routes:
    """The terms of a row, by its field `data_source`.

    Args:
        routes: {source: [terms]}, with `other` for all sources without an entry; empty: every term scores every row.
            The entry of a source is also that of the sources below it: `mmlu` that of "mmlu/anatomy".
        terms: names of all terms.
        accuracy: the term whose value is the accuracy; of a row that it does not score, the first of its terms is.

    Raises:
        ValueError: an entry names no term, or a term that does not exist, or a term is in none; names the key.
    """

    def __init__(self, routes: Mapping[str, Sequence[str]], terms: Sequence[str], accuracy: str) -> None:
        for source, names in routes.items():
            for name in names:
                if name not in terms:
                    known = f"{', '.join(terms)}{did_you_mean(name, terms)}"
                    raise ValueError(f"reward.route.{source}: {name!r} is none of reward.terms ({known})")
            if not names:
                raise ValueError(f"reward.route.{source}: name at least one of reward.terms ({', '.join(terms)})")
        used = {name for names in routes.values() for name in names}
        if routes and (idle := [name for name in terms if name not in used]):
            raise ValueError(f"reward.route: no source has the term {idle[0]!r}; add it to one, or remove the term")
        self._routes = {source: tuple(names) for source, names in routes.items()}
        self._terms = tuple(terms)
        self._accuracy = accuracy

    def every(self) -> list[tuple[str, ...]]:
        """The terms of every route."""
        return list(self._routes.values()) or [self._terms]

    def terms(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The terms that score a row.

        Raises:
            ValueError: its source has no entry.
        """
        if not self._routes:
            return self._terms
        source = str(row.get(SOURCE, OTHER))
        parts = source.split("/")
        known = (self._routes.get("/".join(parts[:count])) for count in range(len(parts), 0, -1))
        names = next((found for found in known if found is not None), self._routes.get(OTHER))
        if names is None:
            raise ValueError(
                f"the field {SOURCE!r} is {source!r}, which has no entry in reward.route (there are "
                f"{', '.join(self._routes)}); add `{source}: [terms]`, or `{OTHER}: [terms]` for all other sources"
            )
        return names

    def accuracy(self, row: Mapping[str, Any]) -> str:
        """The term whose value is the accuracy of a row."""
        return self._main(self.terms(row))

    def accuracies(self) -> set[str]:
        """The terms whose values are the accuracy of some row."""
        return {self._main(names) for names in self.every()}

    def _main(self, names: tuple[str, ...]) -> str:
        return self._accuracy if self._accuracy in names else names[0]
