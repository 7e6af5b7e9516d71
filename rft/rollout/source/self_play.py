"""Batches of pairs whose better response is given, and whose worse one is sampled."""

from typing import Any

from tensordict import TensorDict

from rft.batch.collate import collate
from rft.batch.columns import SOURCE_COLUMNS
from rft.data.encode.encoder import Encoder
from rft.data.given.supervised import DatasetSource
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.metrics import Metrics
from rft.rollout.engine.base import Engine, Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.source.rollout import rollout_row


class SelfPlaySource(DatasetSource):
    """Draws prompts: the response of the data is the chosen one, and each that is sampled is rejected for it.

    SPIN, arXiv 2401.01335, algorithm 1, where there is one sample for a prompt. With more the given response comes as
    often. No reward is asked.

    Args:
        world, engine, encoder, rows, prompts, group_size, sampling, seed: supplied; `prompts` is the number of prompts
            of a step over all ranks, `group_size` that of the samples for each.
        response: the field that holds the response of the data.
    """

    writes = (*SOURCE_COLUMNS, "chosen")

    def __init__(
        self,
        world: World,
        engine: Engine,
        encoder: Encoder,
        rows: Rows,
        prompts: int,
        group_size: int,
        sampling: Sampling,
        seed: int,
        response: str,
    ) -> None:
        super().__init__(world, encoder, rows, prompts, seed, response)
        self.temperature = sampling.temperature
        self._engine = engine
        self._group_size = group_size
        self._sampling = sampling
        self._seed = seed

    @staticmethod
    def given(options: dict[str, Any]) -> type[DatasetSource] | None:
        """See `RolloutSource.given`."""
        return DatasetSource

    def samples(self) -> bool:
        """See `Source.samples`."""
        return True

    def next(self, metrics: Metrics) -> TensorDict:
        """This rank's pairs of the next step, two rows each, the chosen one first."""
        drawn = self._drawn()
        prompts = self._encoder.prompts([row for _, row in drawn])
        seeds = [[row_seed(self._seed, position, n) for n in range(self._group_size)] for position, _ in drawn]
        with metrics.timer("rollout"):
            requests = [Request(prompt, own) for prompt, own in zip(prompts, seeds, strict=True)]
            completions = self._engine.generate(requests, self._sampling, None)
        pairs: list[dict[str, Any]] = []
        for (position, row), prompt, samples in zip(drawn, prompts, completions, strict=True):
            given = self._example(position, row, row[self._response])
            for number, completion in enumerate(samples):
                unit = {"unit": position * self._group_size + number}
                sampled = rollout_row(prompt, completion, row)
                both = ({"chosen": True}, {"chosen": False} | {name: sampled[name] for name in given.keys() & sampled})
                pairs += [given | unit | own for own in both]
        return collate(pairs)
