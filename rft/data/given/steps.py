"""Batches of given answers in which every step has a label."""

from collections.abc import Mapping
from typing import Any

import torch

from rft.batch.columns import SOURCE_COLUMNS
from rft.data.base import CheckContext, SourceContext, SourceFacts
from rft.data.given.supervised import DatasetSource, given_row


class StepSource(DatasetSource):
    """Draws answers in steps; the last token of each step trains, and has the label of the step.

    Rows have TRL's stepwise supervision format: `{prompt, completions: [step, ...], labels: [true, ...]}`.

    Args:
        context: the context of the stage; `prompts` is the number of answers of a step.
        steps: the field that holds the texts of the steps.
        labels: the field with a label for each step: true or false, or a number from 0 to 1.
        separator: the text after every step.
    """

    def __init__(self, context: SourceContext, *, steps: str, labels: str, separator: str) -> None:
        super().__init__(context, response=steps)
        self._labels = labels
        self._separator = separator

    @classmethod
    def facts(cls, options: Mapping[str, Any]) -> SourceFacts:
        """See `Source.facts`."""
        fields = ("prompt", options["steps"], options["labels"])
        return SourceFacts((*SOURCE_COLUMNS, "step_labels"), fields, sampled="never")

    @classmethod
    def check(cls, options: Mapping[str, Any], context: CheckContext) -> None:
        """Checks that the separator is not empty."""
        if not options["separator"]:
            raise ValueError(f"{context.key}.separator is empty: steps need a separator; set it to a text")

    def _example(self, position: int, row: dict[str, Any], response: Any) -> dict[str, Any]:
        ids, ends = self._encoder.steps(row, response, self._separator)
        column = torch.zeros(len(ids))  # (T,)
        labels = step_labels(row[self._labels], len(response), f"algorithm.source.labels={self._labels}")
        column[ends] = torch.tensor(labels[: len(ends)])
        trained = set(ends)
        return given_row(position, row, ids, [index in trained for index in range(len(ids))]) | {"step_labels": column}


def step_labels(labels: Any, count: int, where: str) -> list[float]:
    """The labels of the steps of a row, from 0 to 1.

    Args:
        count: number of steps of the row.
        where: the yaml key of the labels, for messages.

    Raises:
        ValueError: a label is not a number from 0 to 1, or there are not as many labels as steps.
    """
    try:
        found = [float(label) for label in labels]
    except (TypeError, ValueError, OverflowError):
        found = [-1.0]
    if not all(0 <= label <= 1 for label in found):
        raise ValueError(f"{where}: expected true, false or a number from 0 to 1 for every step, got {labels!r:.60}")
    if len(found) != count:
        raise ValueError(f"{where}: a row has {len(found)} labels for {count} steps; give one for every step")
    return found
