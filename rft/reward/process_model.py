"""The scores of a process reward model: a token classifier, as `algorithm=process_reward_model` exports it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from rft.reward.model import RewardModel

AGGREGATES: dict[str, Callable[[Tensor], Tensor]] = {
    "min": torch.min,
    "product": torch.prod,
    "last": lambda probabilities: probabilities[-1],
    "mean": torch.mean,
}


class ProcessRewardModel(RewardModel):
    """Scores the steps of a response: a response is as good as what is made of their probabilities to be right.

    Args:
        key, path, template, template_arguments, system, tools, micro_batch_tokens, dtype: as in `RewardModel`; the path
            is that of a classifier of tokens with two labels, bad and good.
        separator: what stands between the steps, as in training. A step of white space alone is none; a response
            without a step is one that is empty.
        aggregate: of the probabilities of the steps: the lowest (as Math-Shepherd, 2312.08935), their product, which is
            that of no wrong step (PRM800K, 2305.20050), that of the last step, or their mean.
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
        micro_batch_tokens: int,
        dtype: Literal["float32", "bfloat16", "float16"],
        separator: str,
        aggregate: Literal["min", "product", "last", "mean"],
    ) -> None:
        super().__init__(key, path, template, template_arguments, system, tools, micro_batch_tokens, dtype)
        if not separator:
            raise ValueError(f"{key}.separator is empty: nothing would end a step; give it that of the training")
        self._separator = separator
        self._aggregate = AGGREGATES[aggregate]

    @torch.no_grad()
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """See `Term.values`."""
        found = [
            self._encoder.steps(row, self._steps(response), self._separator)
            for response, row in zip(responses, rows, strict=True)
        ]
        scored = zip(self._logits([torch.tensor(ids) for ids, _ in found]), found, strict=True)
        return [float(self._aggregate(logits[ends].softmax(1)[:, 1])) for logits, (_, ends) in scored]

    def _steps(self, response: str) -> list[str]:
        return [step for step in response.split(self._separator) if step.strip()] or [""]
