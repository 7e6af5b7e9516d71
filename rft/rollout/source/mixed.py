"""Batches of given texts or of new ones: a random draw decides for every step."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.batch.counter_rng import generator
from rft.data.base import GivenTexts, SourceFacts
from rft.data.given.supervised import DatasetOptions, DatasetSource, supervised_row
from rft.metrics import Metrics
from rft.ranges import Fraction
from rft.rollout.source.base import RolloutContext
from rft.rollout.source.rollout import RolloutOptions, RolloutSource


@dataclass(frozen=True, kw_only=True)
class MixedOptions(RolloutOptions):
    """Options of `MixedSource`, which has no dynamic sampling and no forced stop.

    Attributes:
        response: the field of a row that holds the given response.
        sampled_share: the probability that a step is sampled. The draw is a function of the seed and the step alone.
    """

    redraw: None = field(init=False, default=None)
    interruption: None = field(init=False, default=None)
    response: str
    sampled_share: Fraction

    def facts(self) -> SourceFacts:
        """The columns are those that both kinds of steps write."""
        if self.sampled_share >= 1:
            return SourceFacts(SOURCE_COLUMNS, fields=("prompt",), sampled="always", scores=True)
        given = GivenTexts(DatasetSource, DatasetOptions(response=self.response))
        fields = ("prompt", self.response)
        return SourceFacts(SOURCE_COLUMNS, fields=fields, sampled="sometimes", scores=True, given=given)

    def always_sampled(self) -> Self:
        """With `sampled_share=0` no step is ever sampled."""
        return replace(self, sampled_share=1.0) if self.sampled_share else self


class MixedSource(RolloutSource):
    """Draws prompts: in some steps the policy answers them, in the others the responses of the data train.

    GKD, arXiv 2306.13649, algorithm 1. Both kinds of steps draw from one order, so that every row comes once an epoch.
    The temperature is that of sampling in every step.
    """

    Options = MixedOptions
    options: MixedOptions

    def __init__(self, options: MixedOptions, context: RolloutContext) -> None:
        super().__init__(options, replace(context, columns=()))
        self._steps = 0

    def samples(self) -> bool:
        draw = torch.rand((), generator=generator(self.context.seed, self._steps))
        return float(draw) < self.options.sampled_share

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step: groups of answers, or a row for each prompt."""
        sampled, context = self.samples(), self.context
        self._steps += 1
        if sampled:
            return super().next(metrics)
        drawn = [
            (position, context.rows[row]) for position, row in self.row_sampler.take(context.prompts)[context.share]
        ]
        name = self.options.response
        return collate([supervised_row(context.encoder, position, row, row[name]) for position, row in drawn])

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and how many steps were drawn."""
        return super().state_dict() | {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps = state["steps"]
