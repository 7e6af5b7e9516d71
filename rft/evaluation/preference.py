"""Held-out pairs of responses: how often a model that gives scores prefers the chosen one. Nothing is sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rft.batch.collate import collate
from rft.data.encode.encoder import Encoder
from rft.data.given.supervised import supervised_row
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.evaluation.base import HeldOut, Measured, Progress


class Grader(HeldOut):
    """Measures a model that gives scores.

    Args:
        world, encoder: as in training.
        scores: from rows to the column `score` (B, T); a collective.
        sets: rows with `fields`, by the name of the set.

    Attributes:
        fields: what a row has.
        always: the numbers that every set has.
        options: of the source of batches, which it takes, too.
    """

    fields: tuple[str, ...]
    always: tuple[str, ...]
    options: tuple[str, ...] = ()

    def __init__(
        self, world: World, encoder: Encoder, scores: Callable[[TensorDict], Tensor], sets: dict[str, Rows]
    ) -> None:
        self._world = world
        self._encoder = encoder
        self._scores = scores
        self._sets = sets

    def _shared(self, rows: Rows, work: Callable[[Sequence[int]], Sequence[Any]]) -> list[Any]:
        """What `work` finds of all rows in order, on every rank; each does its share, or the first row again."""
        mine = list(range(self._world.rank, len(rows), self._world.size)) or [0]
        found = dict(zip(mine, work(mine), strict=True))
        everything = {number: theirs for part in self._world.gather(found) for number, theirs in part.items()}
        return [everything[number] for number in range(len(rows))]

    def _column(self, examples: Sequence[dict[str, Any]]) -> Tensor:
        batch = collate(examples)
        batch["keep"] = batch["response_mask"]
        return self._scores(batch)


@dataclass
class PairScores(Measured):
    """Held-out pairs with the scores of the chosen and of the rejected response."""

    scores: list[tuple[float, float]]

    def numbers(self, chosen: Sequence[int]) -> dict[str, list[float]]:
        """`accuracy`, 1 where the chosen response has the higher score, and `margin`, the difference."""
        gaps = [self.scores[place][0] - self.scores[place][1] for place in chosen]
        return {"accuracy": [float(gap > 0) for gap in gaps], "margin": gaps}

    def texts(self) -> list[dict[str, Any]]:
        """Both responses, the chosen one first."""
        return [
            {"prompt": row["prompt"], "response": row[field], "score": score}
            for row, pair in zip(self.rows, self.scores, strict=True)
            for field, score in zip(("chosen", "rejected"), pair, strict=True)
        ]


class PairEvaluator(Grader):
    """Scores held-out pairs. See `Grader`."""

    fields = ("prompt", "chosen", "rejected")
    always = ("accuracy", "margin")

    def measure(self, progress: Progress) -> dict[str, PairScores]:
        """See `HeldOut.measure`."""
        sets = {}
        for name, rows in self._sets.items():
            with progress(f"evaluate {name}", len(rows)) as show:
                sets[name] = PairScores(rows, self._shared(rows, partial(self._pairs, rows)))
                show(len(rows))
        return sets

    def _pairs(self, rows: Rows, mine: Sequence[int]) -> list[tuple[float, float]]:
        examples = [
            supervised_row(self._encoder, number, row, row[field])
            for number, row in ((number, rows[number]) for number in mine)
            for field in ("chosen", "rejected")
        ]
        return [(chosen, rejected) for chosen, rejected in self._column(examples).sum(1).view(-1, 2).tolist()]
