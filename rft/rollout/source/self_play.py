"""Batches of pairs whose better response is given, and whose worse one is sampled."""

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import GIVEN_COLUMNS
from rft.batch.trajectory import Finish, Segment, Trajectory, to_row
from rft.data.base import GivenTexts, SourceFacts
from rft.data.given.supervised import DatasetSource
from rft.metrics import Metrics
from rft.rollout.source.base import RolloutContext


class SelfPlaySource(DatasetSource):
    """Draws prompts: the response of the data is the chosen one, and each sampled response is rejected for it.

    With one sample for a prompt this is SPIN, arXiv 2401.01335, algorithm 1. With more samples the given response is
    repeated for each of them. No reward is computed.

    Args:
        context: of the stage; `prompts` is the number of prompts of a step, `group_size` that of the samples for each.
        response: the field that holds the response of the data.
    """

    def __init__(self, context: RolloutContext, *, response: str) -> None:
        super().__init__(context, response=response)
        self.temperature = context.sampling.temperature
        self._context = context

    @classmethod
    def facts(cls, options: Mapping[str, Any]) -> SourceFacts:
        """See `Source.facts`."""
        return SourceFacts(
            writes=(*GIVEN_COLUMNS, "chosen"),
            fields=("prompt", options["response"]),
            sampled="always",
            given=GivenTexts(DatasetSource, options),
        )

    def samples(self) -> bool:
        """See `Source.samples`."""
        return True

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's pairs of the next step, two rows each, the chosen one first."""
        context, drawn = self._context, self._draw(lambda position, row: [(position, row)])
        prompts = self._encoder.prompts([row for _, row in drawn])
        requests = context.requests(prompts, [position for position, _ in drawn])
        with metrics.timer("rollout"):
            completions = context.sampler.generate(requests, context.sampling)
        pairs: list[dict[str, Any]] = []
        for (position, row), prompt, samples in zip(drawn, prompts, completions, strict=True):
            given = self._example(position, row, row[self._response])
            for number, completion in enumerate(samples):
                unit = position * context.group_size + number
                # The sampled row gets no columns of the sampling, since the chosen row has none.
                segments = [Segment(prompt, trains=False), Segment(completion.tokens, trains=True)]
                sampled = Trajectory(segments, Finish(completion.finish_reason, completion.text), row)
                pairs.append(given | {"unit": unit, "chosen": True})
                rejected = to_row(sampled, group=position, unit=unit)
                weights = rejected["response_mask"].float()  # the chosen row has them
                pairs.append(rejected | {"token_weights": weights, "chosen": False})
        return collate(pairs)
