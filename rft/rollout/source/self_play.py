"""Batches of pairs whose better response is given, and whose worse one is sampled."""

from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import GIVEN_COLUMNS
from rft.batch.trajectory import Finish, Segment, Trajectory, to_row
from rft.data.base import GivenTexts, SourceFacts
from rft.data.given.supervised import DatasetOptions, DatasetSource
from rft.metrics import Metrics
from rft.rollout.source.base import RolloutContext


@dataclass(frozen=True, kw_only=True)
class SelfPlayOptions(DatasetOptions):
    """Options of `SelfPlaySource`; `response` is the field that holds the response of the data."""

    weight: None = field(init=False, default=None)

    def facts(self) -> SourceFacts:
        return SourceFacts(
            writes=(*GIVEN_COLUMNS, "chosen"),
            fields=("prompt", self.response),
            sampled="always",
            given=GivenTexts(DatasetSource, DatasetOptions(response=self.response)),
        )


class SelfPlaySource(DatasetSource):
    """Draws prompts: the response of the data is the chosen one, and each sampled response is rejected for it.

    With one sample for a prompt this is SPIN, arXiv 2401.01335, algorithm 1. With more samples the given response is
    repeated for each of them. No reward is computed.
    """

    Options = SelfPlayOptions
    options: SelfPlayOptions
    context: RolloutContext

    def __init__(self, options: SelfPlayOptions, context: RolloutContext) -> None:
        super().__init__(options, context)
        self.temperature = context.sampling.temperature

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's pairs of the next step, two rows each, the chosen one first."""
        context, drawn = self.context, self.draw(lambda position, row: [(position, row)])
        prompts = context.encoder.prompts([row for _, row in drawn])
        requests = context.requests(prompts, [position for position, _ in drawn])
        with metrics.timer("rollout"):
            completions = context.sampler.generate(requests, context.sampling)
        pairs: list[dict[str, Any]] = []
        for (position, row), prompt, samples in zip(drawn, prompts, completions, strict=True):
            [given] = self.texts(position, row)
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
