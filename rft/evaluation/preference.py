"""Held-out pairs of responses: how often a model with a score head prefers the chosen one. Nothing is sampled."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rft.actor.score_moments import ScoreMoments, score_moments
from rft.data.base import GivenTexts, SourceOptions
from rft.data.given.pairs import PairOptions, PairSource
from rft.data.given.supervised import supervised_row
from rft.data.rows.lazy import Rows
from rft.evaluation.base import Progress, ScoreEvaluator, SetResult


@dataclass
class PairResult(SetResult):
    """The scores of held-out pairs.

    Attributes:
        scores: of the chosen and of the rejected response.
    """

    scores: list[tuple[float, float]]

    def values(self, indices: Sequence[int]) -> dict[str, list[float]]:
        """`accuracy`, 1 if the chosen response has the higher score, and `margin`, the difference."""
        gaps = [self.scores[index][0] - self.scores[index][1] for index in indices]
        return {"accuracy": [float(gap > 0) for gap in gaps], "margin": gaps}

    def texts(self) -> list[dict[str, Any]]:
        """Both responses, the chosen one first."""
        return [
            {"prompt": row["prompt"], "response": row[field], "score": score}
            for row, pair in zip(self.rows, self.scores, strict=True)
            for field, score in zip(("chosen", "rejected"), pair, strict=True)
        ]


class PairEvaluator(ScoreEvaluator):
    """Scores held-out pairs. The exported model keeps the mean and the deviation of the scores of all sets."""

    fields = ("prompt", "chosen", "rejected")
    metrics = ("accuracy", "margin")
    _moments: ScoreMoments | None = None

    @classmethod
    def given(cls, source: SourceOptions) -> GivenTexts:
        return GivenTexts(PairSource, PairOptions(chosen="chosen", rejected="rejected", margin=None))

    def evaluate(self, progress: Progress) -> dict[str, PairResult]:
        results = {
            name: PairResult(rows, self._on_all_ranks(name, rows, self._pairs, progress))
            for name, rows in self.context.sets.items()
        }
        self._moments = score_moments(torch.tensor([pair for result in results.values() for pair in result.scores]))
        return results

    def config_entries(self) -> dict[str, float]:
        assert self._moments is not None, "`run` has not been called"
        return asdict(self._moments)

    def _pairs(self, rows: Rows, indices: Sequence[int]) -> list[tuple[float, float]]:
        examples = [
            supervised_row(self.context.encoder, index, row, row[field])
            for index, row in ((index, rows[index]) for index in indices)
            for field in ("chosen", "rejected")
        ]
        return [(chosen, rejected) for chosen, rejected in self._score(examples).sum(1).view(-1, 2).tolist()]
