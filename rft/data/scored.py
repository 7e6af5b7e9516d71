"""Pairs from scored answers: what a model sampled and a reward judged, or what people wrote and marked."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rft.data.lazy import Row, Rows, load
from rft.data.rows import check_limit, find
from rft.data.split import identity
from rft.registry import Target

MADE = ("chosen", "rejected", "margin")


class ScoredPairs:
    """Pairs of a better and a worse answer to the same prompt, wherever among the rows the two stand.

    A pair has the fields of the first row with its prompt, and `chosen`, `rejected` and `margin`, the difference of the
    scores. An answer that a prompt has twice counts once, with its first score.

    Args:
        rows: a class that loads rows with a `prompt`, as in `data.train`.
        answers: the field that lists the answers to the prompt, or null where a row is one answer itself.
        text, score: the fields of an answer; those of higher score are better. Names with dots lead into fields.
        most: pairs of a prompt, those farthest apart, or null for all of them.
        limit: the first so many pairs, or null for all.
        key: supplied; the node's place in the yaml, for messages.

    Raises:
        ValueError: `most` leaves no pairs.
    """

    def __init__(
        self,
        rows: Any,
        answers: str | None,
        text: str,
        score: str,
        most: int | None,
        limit: int | None,
        key: str,
    ) -> None:
        if most is not None and most < 1:
            raise ValueError(f"{key}.most={most} leaves no pairs; give at least 1, or null for all")
        self._rows = Target(rows, f"{key}.rows", ("key",))
        self._answers = answers
        self._text = text
        self._score = score
        self._most = most
        self._limit = check_limit(limit, key)
        self._key = key

    def load(self, required: Sequence[str]) -> Rows:
        """All pairs, those of a prompt behind one another.

        Args:
            required: fields that every pair must have, not null.

        Raises:
            ValueError: an answer lacks a field, a score is no number, or no prompt has answers of different scores.
        """
        own = {"prompt", *required} - {*MADE} | ({self._answers} if self._answers else set())
        rows = load(self._rows, own)
        prompts: dict[str, tuple[Row, dict[str, tuple[float, Any]]]] = {}
        for number, row in enumerate(rows):
            _, known = prompts.setdefault(identity(row["prompt"]), (row, {}))
            for score, text in self._scored(row, f"row {number + 1} of {self._rows.key}"):
                known.setdefault(identity(text), (score, text))
        pairs = [pair for row, known in prompts.values() for pair in self._pairs(row, list(known.values()))]
        if not pairs:
            raise ValueError(f"{self._key}: none of {len(prompts)} prompts has answers of different scores")
        return pairs[: self._limit]

    def _scored(self, row: Row, where: str) -> Iterator[tuple[float, Any]]:
        listed = [row] if self._answers is None else row[self._answers]
        if not isinstance(listed, list):
            raise ValueError(f"{where}: {self._key}.answers={self._answers} is no list; name another field")
        for answer in listed:
            text = find(answer, self._text, where, f"{self._key}.text names it")
            score = find(answer, self._score, where, f"{self._key}.score names it")
            try:
                number = float(score)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                raise ValueError(f"{where}: the score {score!r} is no number; {self._key}.score names another field")
            yield number, text

    def _pairs(self, row: Row, answers: list[tuple[float, Any]]) -> list[Row]:
        kept = {name: value for name, value in row.items() if name not in (self._answers, self._text, self._score)}
        pairs = [
            kept | {"chosen": better, "rejected": worse, "margin": high - low}
            for high, better in answers
            for low, worse in answers
            if high > low
        ]
        return sorted(pairs, key=lambda pair: -pair["margin"])[: self._most]
