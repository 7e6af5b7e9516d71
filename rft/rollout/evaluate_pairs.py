"""Held-out pairs of responses: how often a model that gives scores prefers the chosen one. Nothing is sampled."""

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rft.batch import collate
from rft.data.encode import Encoder
from rft.data.lazy import Rows
from rft.data.source import supervised_row
from rft.distributed import World
from rft.rollout.estimate import with_error
from rft.rollout.evaluate import Progress

FIELDS = ("prompt", "chosen", "rejected")
MEASURED = ("accuracy", "margin")


class PairEvaluator:
    """Scores held-out pairs.

    Args:
        world, encoder: as in training.
        scores: from rows to the score of each (B,); a collective.
        sets: rows with `FIELDS`, by the name of the set.
    """

    def __init__(
        self,
        world: World,
        encoder: Encoder,
        scores: Callable[[TensorDict], Tensor],
        sets: dict[str, Rows],
    ) -> None:
        self._world = world
        self._encoder = encoder
        self._scores = scores
        self._sets = sets

    def run(self, progress: Progress) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
        """Evaluates every set.

        Args:
            progress: opens a progress bar (name, total) that is called with the number of rows that are done.

        Returns:
            `eval/<set>/accuracy`, the share of the pairs whose chosen response has the higher score, and
            `eval/<set>/margin`, the mean difference, each with `_stderr`; and the scored responses, for people to read.
        """
        numbers: dict[str, float] = {}
        texts: dict[str, list[dict[str, Any]]] = {}
        for name, rows in self._sets.items():
            with progress(f"evaluate {name}", len(rows)) as show:
                scored = self._score(rows)
                show(len(rows))
            gaps = [chosen - rejected for chosen, rejected in scored]
            numbers |= with_error(f"eval/{name}/accuracy", [float(gap > 0) for gap in gaps])
            numbers |= with_error(f"eval/{name}/margin", gaps)
            texts[name] = [
                {"prompt": row["prompt"], "response": row[field], "score": score}
                for row, pair in zip(rows, scored, strict=True)
                for field, score in zip(("chosen", "rejected"), pair, strict=True)
            ]
        return numbers, texts

    def _score(self, rows: Rows) -> list[tuple[float, float]]:
        """The two scores of all rows in order, on every rank; each rank does its share, or the first row again."""
        mine = list(range(self._world.rank, len(rows), self._world.size)) or [0]
        batch = collate([row for number in mine for row in self._pair(number, rows[number])])
        batch["keep"] = batch["response_mask"]
        scores = self._scores(batch).view(-1, 2).tolist()
        found = {number: (chosen, rejected) for number, (chosen, rejected) in zip(mine, scores, strict=True)}
        everything = {number: pair for part in self._world.gather(found) for number, pair in part.items()}
        return [everything[number] for number in range(len(rows))]

    def _pair(self, number: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        return [supervised_row(self._encoder, number, row, row[field]) for field in ("chosen", "rejected")]
