"""Held-out pairs of responses: how often a model with a score head prefers the chosen one. Nothing is sampled."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from rft.actor.score_moments import ScoreMoments, score_moments
from rft.batch.collate import collate
from rft.data.base import GivenTexts, SourceOptions
from rft.data.given.pairs import PairOptions, PairSource
from rft.data.given.supervised import supervised_row
from rft.data.rows.lazy import Rows
from rft.evaluation.base import EvaluationContext, Progress, RowEvaluator, SetResult, collect, share


@dataclass(eq=False)
class ScoreEvaluator(RowEvaluator):
    """Evaluates a model with a score head.

    Attributes:
        fields: the fields of a row that it reads.
        metrics: those that every set has.
        context: see `EvaluationContext`. Its rows have the class's `fields`.
        scores: computes the column `score` (B, T) of rows; a collective.
        source: the options of the source of batches.
    """

    fields: ClassVar[tuple[str, ...]]
    metrics: ClassVar[tuple[str, ...]]
    context: EvaluationContext
    scores: Callable[[TensorDict], Tensor]
    source: Any

    @classmethod
    @abstractmethod
    def given(cls, source: Any) -> GivenTexts:
        """What makes the texts of a held-out row, where training has a source with these options."""

    def _on_all_ranks(
        self, name: str, rows: Rows, work: Callable[[Rows, Sequence[int]], Sequence[Any]], progress: Progress
    ) -> list[Any]:
        """What `work` returns for all rows of a set in order, on every rank.

        Each rank works on its share. A rank without rows works on the first row, since the forward is a collective.
        """
        indices = share(self.context.world, rows) or [0]
        with progress(f"evaluate {name}", len(rows)) as show:
            results = collect(self.context.world, dict(zip(indices, work(rows, indices), strict=True)), len(rows))
            show(len(rows))
        return results

    def _score(self, examples: Sequence[dict[str, Any]]) -> Tensor:
        """The column `score` (B, T) of some rows of a batch."""
        batch = collate(examples)
        batch["loss_mask"] = batch["response_mask"]
        return self.scores(batch)


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
