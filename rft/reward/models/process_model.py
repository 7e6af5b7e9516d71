"""The scores of a process reward model: a token classifier, as `algorithm=process_reward_model` exports it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rft.batch.encoded import EncodedText
from rft.reward.models.base import ClassifierOptions, ClassifierTerm

AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "min": torch.min,
    "product": torch.prod,
    "last": lambda probabilities: probabilities[-1],
    "mean": torch.mean,
}


@dataclass(frozen=True)
class ProcessRewardModelOptions(ClassifierOptions):
    """The options of a token classifier with two labels, bad and good.

    Attributes:
        separator: the text between steps, as in training. White space alone is not a step; a response without a step
            counts as one empty step.
        aggregate: of the probabilities of the steps: the lowest (Math-Shepherd, 2312.08935), the product, which is the
            probability of no wrong step (PRM800K, 2305.20050), that of the last step, or the mean.
    """

    separator: str
    aggregate: Literal["min", "product", "last", "mean"]


class ProcessRewardModel(ClassifierTerm):
    """Scores a response by aggregating the probabilities that its steps are right.

    Raises:
        ValueError: the separator is empty; names the key.
    """

    Options = ProcessRewardModelOptions
    options: ProcessRewardModelOptions
    head = "step"

    def __init__(self, key: str, options: ProcessRewardModelOptions) -> None:
        super().__init__(key, options)
        if not options.separator:
            raise ValueError(f"{key}.separator is empty: no step would end; set the separator of the training")

    @torch.no_grad()
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        ends: list[list[int]] = []  # of the steps of each response

        def encode() -> list[EncodedText]:
            encoded = [
                self._encoder.steps(row, self._steps(response), self.options.separator)
                for response, row in zip(responses, rows, strict=True)
            ]
            ends.extend(places for _, places in encoded)
            return [ids for ids, _ in encoded]

        scored = zip(self._outputs(encode), ends, strict=True)
        aggregate = AGGREGATES[self.options.aggregate]
        return [float(aggregate(logits[places].softmax(1)[:, 1])) for logits, places in scored]

    def _steps(self, response: str) -> list[str]:
        return [step for step in response.split(self.options.separator) if step.strip()] or [""]
