"""Rows made from scored answers, such as samples of a model with rewards or texts with human ratings."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from rft.data.row_checks import identity
from rft.data.rows.lazy import Row, Rows, load
from rft.data.rows.sources import find
from rft.ranges import PositiveInt
from rft.registry import Target


class Answer(NamedTuple):
    """A scored answer and its row."""

    row: Row
    score: float
    text: Any


@dataclass
class Scored:
    """The common part of classes whose rows hold scored answers.

    Args:
        rows, answers, text, score, key: see `ScoredPairs`.
    """

    rows: Any
    answers: str | None
    text: str
    score: str
    key: str
    made: ClassVar[tuple[str, ...]]  # fields that the class writes

    def __post_init__(self) -> None:
        self._rows = Target(self.rows, f"{self.key}.rows", ("key",))

    def scored(self, required: Sequence[str]) -> Iterator[Answer]:
        """All answers, in the order of the rows.

        Args:
            required: fields that every row must have, not null; those of `made` are ignored.

        Raises:
            ValueError: an answer lacks a field, or a score is not a number.
        """
        own = {"prompt", *required} - {*self.made} | ({self.answers} if self.answers else set())
        for number, row in enumerate(load(self._rows, own)):
            where = f"row {number + 1} of {self._rows.key}"
            listed = [row] if self.answers is None else row[self.answers]
            if not isinstance(listed, list):
                raise ValueError(f"{where}: {self.key}.answers={self.answers} is not a list; name another field")
            for answer in listed:
                text = find(answer, self.text, where, f"set {self.key}.text to its name")
                yield Answer(row, self._number(answer, where), text)

    def _number(self, answer: Any, where: str) -> float:
        score = find(answer, self.score, where, f"set {self.key}.score to its name")
        try:
            number = float(score)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{where}: the score {score!r:.60} is not a number; set {self.key}.score to another field")
        return number

    def kept(self, row: Row) -> Row:
        """The row without its answers."""
        return {name: value for name, value in row.items() if name not in (self.answers, self.text, self.score)}


@dataclass
class ScoredPairs(Scored):
    """Pairs of a better and a worse answer to the same prompt; the answers may be in different rows.

    A pair has the fields of the first row with its prompt, and `chosen`, `rejected` and `margin`, the difference of the
    scores. Equal answers to a prompt count once, with the first score.

    Args:
        rows: a class that loads rows with a `prompt`, as in `data.train`.
        answers: the field with the list of answers to the prompt, or null if each row is one answer.
        text, score: the fields of an answer; a higher score is better. Names with dots are paths through nested fields.
        most: maximal number of pairs of a prompt; those with the largest margins are kept. Null keeps all.
        limit: takes the first `limit` pairs, or all if null.
        key: supplied by the run: the yaml key of the node, for messages.

    Raises:
        ValueError: `most` leaves no pairs.
    """

    most: int | None
    limit: PositiveInt | None
    made = ("chosen", "rejected", "margin")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most is not None and self.most < 1:
            raise ValueError(f"{self.key}.most={self.most} leaves no pairs; give at least 1, or null for all")

    def load(self, required: Sequence[str]) -> Rows:
        """All pairs, grouped by prompt.

        Args:
            required: fields that every pair must have, not null.

        Raises:
            ValueError: no prompt has answers of different scores, or as in `Scored.scored`.
        """
        prompts: dict[str, dict[str, Answer]] = {}
        for answer in self.scored(required):
            prompts.setdefault(identity(answer.row["prompt"]), {}).setdefault(identity(answer.text), answer)
        pairs = [pair for known in prompts.values() for pair in self._pairs(list(known.values()))]
        if not pairs:
            raise ValueError(f"{self.key}: none of {len(prompts)} prompts has answers of different scores")
        return pairs[: self.limit]

    def _pairs(self, answers: list[Answer]) -> list[Row]:
        kept = self.kept(answers[0].row)
        pairs = [
            kept | {"chosen": better.text, "rejected": worse.text, "margin": better.score - worse.score}
            for better in answers
            for worse in answers
            if better.score > worse.score
        ]
        return sorted(pairs, key=lambda pair: -pair["margin"])[: self.most]


@dataclass
class ScoredAnswers(Scored):
    """One row per answer: `completion`, and a `label` that is true if its score is at least `good`.

    Args:
        rows, answers, text, score, key: see `ScoredPairs`.
        good: the lowest score of a good answer.
        limit: takes the first `limit` answers, or all if null.
    """

    good: float
    limit: PositiveInt | None
    made = ("completion", "label")

    def load(self, required: Sequence[str]) -> Rows:
        """All answers, in the order of the rows.

        Args:
            required: fields that every row must have, not null.

        Raises:
            ValueError: all answers are good, or none is; or as in `Scored.scored`.
        """
        rows = [
            self.kept(row) | {"completion": text, "label": score >= self.good}
            for row, score, text in self.scored(required)
        ]
        if len({row["label"] for row in rows}) < 2:
            good = sum(row["label"] for row in rows)
            raise ValueError(f"{self.key}.good={self.good}: {good} of {len(rows)} answers are good; choose another")
        return rows[: self.limit]
