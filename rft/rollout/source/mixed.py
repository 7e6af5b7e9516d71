"""Batches of given texts or of new ones: a random draw decides for every step."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.batch.counter_rng import generator
from rft.data.base import CheckContext, GivenTexts, SourceFacts
from rft.data.encode.encoder import Encoder
from rft.data.given.supervised import DatasetSource, supervised_row
from rft.metrics import Metrics
from rft.ranges import Fraction
from rft.rollout.source.base import RolloutContext
from rft.rollout.source.rollout import RolloutSource


class MixedSource(RolloutSource):
    """Draws prompts: in some steps the policy answers them, in the others the responses of the data train.

    GKD, arXiv 2306.13649, algorithm 1. Both kinds of steps draw from one order, so that every row comes once an epoch.

    Args:
        context: see `RolloutSource`. The temperature is that of sampling in every step.
        response: the field of a row that holds the given response.
        sampled_share: the probability that a step is sampled. The draw is a function of the seed and the step alone.
    """

    def __init__(self, context: RolloutContext, *, response: str, sampled_share: Fraction) -> None:
        super().__init__(replace(context, columns=()), redraw=None, interruption=None)
        self._response = response
        self._share = sampled_share
        self._steps = 0

    @classmethod
    def facts(cls, options: Mapping[str, Any]) -> SourceFacts:
        """See `Source.facts`. The columns are those that both kinds of steps write."""
        if options["sampled_share"] >= 1:
            return SourceFacts(SOURCE_COLUMNS, fields=("prompt",), sampled="always", scores=True)
        given = GivenTexts(DatasetSource, {"response": options["response"]})
        fields = ("prompt", options["response"])
        return SourceFacts(SOURCE_COLUMNS, fields=fields, sampled="sometimes", scores=True, given=given)

    @classmethod
    def check(cls, options: Mapping[str, Any], context: CheckContext) -> None:
        """Checks nothing: this source has no dynamic sampling."""

    @classmethod
    def check_tokens(cls, options: Mapping[str, Any], context: CheckContext, encoder: Encoder) -> None:
        """Checks nothing: this source has no forced stop."""

    @classmethod
    def always_sampled(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """See `Source.always_sampled`. With `sampled_share=0` no step is ever sampled."""
        return {**options, "sampled_share": 1.0} if options["sampled_share"] else dict(options)

    def samples(self) -> bool:
        """See `Source.samples`."""
        draw = torch.rand((), generator=generator(self._context.seed, self._steps))
        return float(draw) < self._share

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step: groups of answers, or a row for each prompt."""
        sampled, context = self.samples(), self._context
        self._steps += 1
        if sampled:
            return super().next(metrics)
        drawn = [
            (position, context.rows[row]) for position, row in self._row_sampler.take(context.prompts)[self._local]
        ]
        return collate([supervised_row(context.encoder, place, row, row[self._response]) for place, row in drawn])

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and how many steps were drawn."""
        return super().state_dict() | {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Source.load_state_dict`."""
        super().load_state_dict(state)
        self._steps = state["steps"]
