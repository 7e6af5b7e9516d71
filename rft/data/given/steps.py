"""Batches of given answers in which every step has a label."""

from dataclasses import dataclass
from typing import Any

import torch

from rft.batch.columns import SOURCE_COLUMNS
from rft.data.base import CheckContext, GivenSource, SourceFacts, SourceOptions
from rft.data.given.supervised import given_row


@dataclass(frozen=True, kw_only=True)
class StepOptions(SourceOptions):
    """Options of `StepSource`.

    Attributes:
        steps: the field that holds the texts of the steps.
        labels: the field with a label for each step: true or false, or a number from 0 to 1.
        separator: the text after every step.
    """

    steps: str
    labels: str
    separator: str

    def facts(self) -> SourceFacts:
        fields = ("prompt", self.steps, self.labels)
        return SourceFacts((*SOURCE_COLUMNS, "step_labels"), fields, sampled="never")

    def check(self, context: CheckContext) -> None:
        """Checks that the separator is not empty."""
        if not self.separator:
            raise ValueError(f"{context.key}.separator is empty: steps need a separator; set it to a text")


class StepSource(GivenSource):
    """Draws answers in steps; the last token of each step trains, and has the label of the step.

    Rows have TRL's stepwise supervision format: `{prompt, completions: [step, ...], labels: [true, ...]}`.
    """

    Options = StepOptions
    options: StepOptions

    def texts(self, position: int, row: dict[str, Any]) -> list[dict[str, Any]]:
        steps, name = row[self.options.steps], self.options.labels
        ids, ends = self.context.encoder.steps(row, steps, self.options.separator)
        column = torch.zeros(len(ids))  # (T,)
        labels = step_labels(row[name], len(steps), f"algorithm.source.labels={name}")
        column[ends] = torch.tensor(labels[: len(ends)])
        trained = set(ends)
        made = given_row(position, row, ids, [index in trained for index in range(len(ids))])
        return [made | {"step_labels": column}]


def step_labels(labels: Any, count: int, where: str) -> list[float]:
    """The labels of the steps of a row, from 0 to 1.

    Args:
        count: number of steps of the row.
        where: the yaml key of the labels, for messages.

    Raises:
        ValueError: a label is not a number from 0 to 1, or there are not as many labels as steps.
    """
    try:
        numbers = [float(label) for label in labels]
    except (TypeError, ValueError, OverflowError):
        numbers = [-1.0]
    if not all(0 <= label <= 1 for label in numbers):
        raise ValueError(f"{where}: expected true, false or a number from 0 to 1 for every step, got {labels!r:.60}")
    if len(numbers) != count:
        raise ValueError(f"{where}: a row has {len(numbers)} labels for {count} steps; give one for every step")
    return numbers
