"""Held-out answers with labelled steps: how often a model that scores them tells right from wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tensordict import TensorDict
from torch import Tensor

from rft.data.encode.encoder import Encoder
from rft.data.given.steps import step_labels
from rft.data.given.supervised import example_row
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.evaluation.base import Measured, Progress
from rft.evaluation.preference import Grader

RIGHT = 0.5  # above which a step is held to be right, by its label or by its probability


@dataclass
class StepScores(Measured):
    """Held-out answers with the probability that each of their steps is right.

    Attributes:
        separator: what stands behind a step.
        labels: of the steps, from 0 to 1.
        probabilities: of the steps.
    """

    separator: str
    labels: list[list[float]]
    probabilities: list[list[float]]

    def numbers(self, chosen: Sequence[int]) -> dict[str, list[float]]:
        """Of steps `accuracy`, 1 where label and probability are on one side of a half, and the probability of good and
        of bad ones; of answers `first_error`, 1 where the first step held to be wrong is the first wrong one, or both
        are missing (ProcessBench, 2412.06559)."""
        answers = [(self.labels[place], self.probabilities[place]) for place in chosen]
        steps = [step for labels, found in answers for step in zip(labels, found, strict=True)]
        numbers = {
            "accuracy": [float((label > RIGHT) == (found > RIGHT)) for label, found in steps],
            "first_error": [float(first_wrong(labels) == first_wrong(found)) for labels, found in answers],
            "probability_good": [found for label, found in steps if label > RIGHT],
            "probability_bad": [found for label, found in steps if label <= RIGHT],
        }
        return {name: values for name, values in numbers.items() if values}

    def texts(self) -> list[dict[str, Any]]:
        """The answers, scored by their weakest step."""
        return [
            {"prompt": row["prompt"], "response": self.separator.join(row["completions"]), "score": min(found)}
            | {"steps": found, "labels": labels}
            for row, labels, found in zip(self.rows, self.labels, self.probabilities, strict=True)
        ]


def first_wrong(steps: Sequence[float]) -> int | None:
    """The place of the first step that is not right; None where all are."""
    return next((place for place, value in enumerate(steps) if value <= RIGHT), None)


class StepEvaluator(Grader):
    """Scores the steps of held-out answers. See `Grader`.

    Args:
        separator: what stands behind a step, as in training.
    """

    fields = ("prompt", "completions", "labels")
    always = ("accuracy", "first_error")
    options = ("separator",)

    def __init__(
        self,
        world: World,
        encoder: Encoder,
        scores: Callable[[TensorDict], Tensor],
        sets: dict[str, Rows],
        separator: str,
    ) -> None:
        super().__init__(world, encoder, scores, sets)
        self._separator = separator

    def measure(self, progress: Progress) -> dict[str, StepScores]:
        """See `HeldOut.measure`."""
        sets = {}
        for name, rows in self._sets.items():
            where = f"data.eval.{name}: the field labels"
            labels = [step_labels(row["labels"], len(row["completions"]), where) for row in rows]
            with progress(f"evaluate {name}", len(rows)) as show:
                found = self._shared(rows, partial(self._steps, rows))
                show(len(rows))
            sets[name] = StepScores(rows, self._separator, labels, found)
        return sets

    def _steps(self, rows: Rows, mine: Sequence[int]) -> list[list[float]]:
        found, examples = [self._encoder.steps(rows[n], rows[n]["completions"], self._separator) for n in mine], []
        for number, (ids, ends) in zip(mine, found, strict=True):
            examples.append(example_row(number, rows[number], ids, [place in ends for place in range(len(ids))]))
        column = self._column(examples).sigmoid()  # (B, T)
        return [column[row, ends].tolist() for row, (_, ends) in enumerate(found)]
