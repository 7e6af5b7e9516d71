"""The scores of a process reward model: a token classifier, as `algorithm=process_reward_model` exports it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rft.batch.encoded import EncodedText
from rft.ranges import PositiveInt
from rft.reward.models.base import ClassifierTerm

AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "min": torch.min,
    "product": torch.prod,
    "last": lambda probabilities: probabilities[-1],
    "mean": torch.mean,
}


class ProcessRewardModel(ClassifierTerm):
    """Scores a response by aggregating the probabilities that its steps are right.

    Args:
        key, path, template, template_arguments, system, tools, micro_batch_tokens, dtype, trust_remote_code: as in
            `ModelTerm`; the path is that of a token classifier with two labels, bad and good.
        separator: the text between steps, as in training. White space alone is not a step; a response without a step
            counts as one empty step.
        aggregate: of the probabilities of the steps: the lowest (Math-Shepherd, 2312.08935), the product, which is the
            probability of no wrong step (PRM800K, 2305.20050), that of the last step, or the mean.
    """

    head = "step"

    def __init__(
        self,
        key: str,
        path: str,
        template: str,
        template_arguments: dict[str, Any],
        system: str | None,
        tools: str | None,
        micro_batch_tokens: PositiveInt,
        dtype: Literal["float32", "bfloat16", "float16"],
        trust_remote_code: bool,
        separator: str,
        aggregate: Literal["min", "product", "last", "mean"],
    ) -> None:
        super().__init__(
            key, path, template, template_arguments, system, tools, micro_batch_tokens, dtype, trust_remote_code
        )
        if not separator:
            raise ValueError(f"{key}.separator is empty: no step would end; set the separator of the training")
        self._separator = separator
        self._aggregate = AGGREGATES[aggregate]

    @torch.no_grad()
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """See `Term.values`."""
        ends: list[list[int]] = []  # of the steps of each response

        def encode() -> list[EncodedText]:
            found = [
                self._encoder.steps(row, self._steps(response), self._separator)
                for response, row in zip(responses, rows, strict=True)
            ]
            ends.extend(places for _, places in found)
            return [ids for ids, _ in found]

        scored = zip(self._outputs(encode), ends, strict=True)
        return [float(self._aggregate(logits[places].softmax(1)[:, 1])) for logits, places in scored]

    def _steps(self, response: str) -> list[str]:
        return [step for step in response.split(self._separator) if step.strip()] or [""]
