"""Batches of given texts, or of new ones: which of the two a step trains on is drawn anew for each."""

from typing import Any

import torch
from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.batch.counter_rng import generator
from rft.data.encode.encoder import Encoder
from rft.data.given.supervised import DatasetSource, supervised_row
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.metrics import Metrics
from rft.rollout.engine.base import Engine
from rft.rollout.engine.sampling import Sampling
from rft.rollout.source.rollout import RolloutSource, Score


class MixedSource(RolloutSource):
    """Draws prompts: the policy answers those of some steps, and the others come with the responses of the data.

    GKD, arXiv 2306.13649, algorithm 1. Both kinds of steps draw from one order, so that every row comes once an epoch.

    Args:
        world, engine, encoder, score, rows, prompts, group_size, sampling, seed: see `RolloutSource`. The temperature
            is that of sampling in every step.
        response: the field of a row that holds the given response.
        sampled_share: the chance of a step to be sampled. The draw is a function of the seed and the step alone.
    """

    writes = SOURCE_COLUMNS
    can_write = ()

    def __init__(
        self,
        world: World,
        engine: Engine,
        encoder: Encoder,
        score: Score,
        rows: Rows,
        prompts: int,
        group_size: int,
        sampling: Sampling,
        seed: int,
        response: str,
        sampled_share: float,
    ) -> None:
        supplied = (world, engine, encoder, score, rows, prompts, group_size, sampling, seed)
        super().__init__(*supplied, columns=(), redraw=None, interruption=None)
        self._response = response
        self._share = sampled_share
        self._steps = 0

    @staticmethod
    def given(options: dict[str, Any]) -> type[DatasetSource] | None:
        """See `RolloutSource.given`."""
        return DatasetSource if options["sampled_share"] < 1 else None

    @staticmethod
    def needs(options: dict[str, Any]) -> tuple[str, ...]:
        """The fields of a row that this source reads."""
        return (MixedSource.given(options) or RolloutSource).needs(options)

    def samples(self) -> bool:
        """See `Source.samples`."""
        return float(torch.rand((), generator=generator(self._seed, self._steps))) < self._share

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's rows of the next step: groups of answers, or a row for each prompt."""
        sampled = self.samples()
        self._steps += 1
        if sampled:
            return super().next(metrics)
        drawn = [(position, self._rows[row]) for position, row in self._rows_sampler.take(self._prompts)[self._mine]]
        return collate([supervised_row(self._encoder, place, row, row[self._response]) for place, row in drawn])

    def state_dict(self) -> dict[str, Any]:
        """Where in the data this source is, and how many steps it has drawn."""
        return super().state_dict() | {"steps": self._steps}

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Takes up the states of all ranks of the run that wrote them, on any number of ranks."""
        super().load_state_dict(states)
        self._steps = states[0]["steps"]
