"""Batches of given answers whose steps are labelled one by one."""

from typing import Any

import torch

from rft.batch.columns import SOURCE_COLUMNS
from rft.data.encode.encoder import Encoder
from rft.data.given.supervised import DatasetSource, example_row
from rft.data.rows.lazy import Rows
from rft.distributed import World


class StepSource(DatasetSource):
    """Draws answers in steps; of each step the last token trains, and has the label of the step.

    The rows are those that TRL calls stepwise supervision: `{prompt, completions: [step, ...], labels: [true, ...]}`.

    Args:
        world, encoder, rows, prompts, seed: supplied; `prompts` is the number of answers of a step over all ranks.
        steps: the field that holds the texts of the steps.
        labels: the field that says of each whether the answer is right up to there: true or false, or from 0 to 1.
        separator: what stands behind every step.

    Raises:
        ValueError: the separator is empty.
    """

    writes = (*SOURCE_COLUMNS, "step_labels")

    def __init__(
        self,
        world: World,
        encoder: Encoder,
        rows: Rows,
        prompts: int,
        seed: int,
        steps: str,
        labels: str,
        separator: str,
    ) -> None:
        super().__init__(world, encoder, rows, prompts, seed, steps)
        self._labels = labels
        self._separator = separator
        if not separator:
            raise ValueError("algorithm.source.separator is empty: nothing would end a step; give it a text")

    @staticmethod
    def needs(options: dict[str, Any]) -> tuple[str, ...]:
        """The fields of a row that this source reads."""
        return ("prompt", options["steps"], options["labels"])

    def _example(self, position: int, row: dict[str, Any], response: Any) -> dict[str, Any]:
        ids, ends = self._encoder.steps(row, response, self._separator)
        column = torch.zeros(len(ids))
        column[ends] = torch.tensor(
            step_labels(row[self._labels], len(ends), f"algorithm.source.labels={self._labels}")
        )
        places = set(ends)
        return example_row(position, row, ids, [place in places for place in range(len(ids))]) | {"step_labels": column}


def step_labels(labels: Any, count: int, where: str) -> list[float]:
    """The labels of the steps of a row, from 0 to 1.

    Args:
        count: of its steps.
        where: they are, for messages.

    Raises:
        ValueError: a label is something else, or there are not as many of them as steps.
    """
    try:
        found = [float(label) for label in labels]
    except (TypeError, ValueError):
        found = [-1.0]
    if not all(0 <= label <= 1 for label in found):
        raise ValueError(f"{where}: expected true, false or a number from 0 to 1 for every step, got {labels!r:.60}")
    if len(found) != count:
        raise ValueError(f"{where}: a row has {len(found)} labels for {count} steps; give one for every step")
    return found
