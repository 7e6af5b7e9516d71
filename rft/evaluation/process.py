"""Held-out answers with labelled steps: how often a model that scores steps tells right from wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rft.data.base import GivenTexts
from rft.data.given.steps import StepOptions, StepSource, step_labels
from rft.data.given.supervised import given_row
from rft.data.rows.lazy import Rows
from rft.evaluation.base import Progress, ScoreEvaluator, SetResult

RIGHT = 0.5  # a step with a label or a probability above it counts as right


@dataclass
class StepResult(SetResult):
    """The probability of each step of held-out answers to be right.

    Attributes:
        separator: stands behind every step.
        labels: of the steps, from 0 to 1.
        probabilities: of the steps.
    """

    separator: str
    labels: list[list[float]]
    probabilities: list[list[float]]

    def values(self, indices: Sequence[int]) -> dict[str, list[float]]:
        """Of steps `accuracy`, 1 if label and probability are on one side of a half, and the probability of good and of
        bad ones; of answers `first_error`, 1 if the first step predicted to be wrong is the first wrong one, or both
        are missing (ProcessBench, 2412.06559)."""
        answers = [(self.labels[index], self.probabilities[index]) for index in indices]
        steps = [step for labels, probabilities in answers for step in zip(labels, probabilities, strict=True)]
        values = {
            "accuracy": [float((label > RIGHT) == (probability > RIGHT)) for label, probability in steps],
            "first_error": [float(first_wrong(labels) == first_wrong(right)) for labels, right in answers],
            "probability_good": [probability for label, probability in steps if label > RIGHT],
            "probability_bad": [probability for label, probability in steps if label <= RIGHT],
        }
        return {name: numbers for name, numbers in values.items() if numbers}

    def texts(self) -> list[dict[str, Any]]:
        """The answers, scored by their weakest step."""
        return [
            {"prompt": row["prompt"], "response": self.separator.join(row["completions"]), "score": min(steps)}
            | {"steps": steps, "labels": labels}
            for row, labels, steps in zip(self.rows, self.labels, self.probabilities, strict=True)
        ]


def first_wrong(steps: Sequence[float]) -> int | None:
    """The index of the first step that is not right; None if all are."""
    return next((place for place, value in enumerate(steps) if value <= RIGHT), None)


class StepEvaluator(ScoreEvaluator):
    """Scores the steps of held-out answers, with the separator of training behind every step."""

    fields = ("prompt", "completions", "labels")
    metrics = ("accuracy", "first_error")
    source: StepOptions

    @classmethod
    def given(cls, source: StepOptions) -> GivenTexts:
        return GivenTexts(StepSource, replace(source, steps="completions", labels="labels"))

    def evaluate(self, progress: Progress) -> dict[str, StepResult]:
        results = {}
        for name, rows in self.context.sets.items():
            where = f"data.eval.{name}: the field labels"
            labels = [step_labels(row["labels"], len(row["completions"]), where) for row in rows]
            probabilities = self._on_all_ranks(name, rows, self._steps, progress)
            # an answer that is cut has fewer steps
            labels = [given[: len(steps)] for given, steps in zip(labels, probabilities, strict=True)]
            results[name] = StepResult(rows, self.source.separator, labels, probabilities)
        return results

    def _steps(self, rows: Rows, indices: Sequence[int]) -> list[list[float]]:
        """The probabilities of the steps of some rows."""
        encoder = self.context.encoder
        encoded = [encoder.steps(rows[index], rows[index]["completions"], self.source.separator) for index in indices]
        examples = [
            given_row(index, rows[index], ids, [place in ends for place in range(len(ids))])
            for index, (ids, ends) in zip(indices, encoded, strict=True)
        ]
        probabilities = self._score(examples).sigmoid()  # (B, T)
        return [probabilities[row, ends].tolist() for row, (_, ends) in enumerate(encoded)]
