"""Which terms score a row by its data source: `reward.route`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rft.errors import did_you_mean
from rft.reward.route import SOURCE, Routes

OTHER = "other"  # the entry of rows whose source has none


class SourceRoutes(Routes):
    """The terms of a row, by its field `data_source`.

    Args:
        routes: {source: [terms]}, with `other` for all sources without an entry. The entry of a source is also that of
            the sources below it: `mmlu` that of "mmlu/anatomy".
        terms, accuracy: see `Routes`.

    Raises:
        ValueError: an entry names no term, or a term that does not exist, or a term is in none; names the key.
    """

    def __init__(self, routes: Mapping[str, Sequence[str]], terms: Sequence[str], accuracy: str) -> None:
        super().__init__(terms, accuracy)
        for source, names in routes.items():
            for name in names:
                if name not in terms:
                    known = f"{', '.join(terms)}{did_you_mean(name, terms)}"
                    raise ValueError(f"reward.route.{source}: {name!r} is none of reward.terms ({known})")
            if not names:
                raise ValueError(f"reward.route.{source}: name at least one of reward.terms ({', '.join(terms)})")
        used = {name for names in routes.values() for name in names}
        if idle := [name for name in terms if name not in used]:
            raise ValueError(f"reward.route: no source has the term {idle[0]!r}; add it to one, or remove the term")
        self._routes = {source: tuple(names) for source, names in routes.items()}

    def every(self) -> list[tuple[str, ...]]:
        return list(self._routes.values())

    def terms(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The terms that score a row.

        Raises:
            ValueError: its source has no entry.
        """
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
