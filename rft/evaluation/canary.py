"""Canary tasks: no honest response solves them, so a policy that solves one exploits a mistake of the reward."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

from rft.batch.scores import mean_of_scored, number_or_none
from rft.data.encode.encoder import Encoder
from rft.data.encode.parts import with_data_urls
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.evaluation.base import Progress, collect, share, term_scores
from rft.logger.history import CANARY
from rft.reward.compose import WeightedSum
from rft.rollout.engine.base import Request, row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler

SHOWN = 3  # responses in a message
LONGEST = 400  # characters of a text in a message


@dataclass(frozen=True)
class CanaryResult:
    """The responses to all canary tasks.

    Attributes:
        accuracy: their mean accuracy, where a value below 0 counts as 0 and one above 1 as 1; None if no response has a
            score.
        texts: `{prompt, response, score, accuracy}` and the terms of each, the highest accuracy first.
    """

    accuracy: float | None
    texts: list[dict[str, Any]]


class CanaryProbe:
    """Samples responses to canary tasks as training samples, and scores them. They are in no batch and train nothing.

    Args:
        world: the processes of the run; each answers its share of the tasks.
        encoder: makes token ids of rows.
        sampler: holds the weights of the policy.
        reward: scores the responses; its options `canary` say how many, when, and which accuracy is too high.
        rows: the tasks.
        sampling: how training samples.
        seed: of the run.
    """

    def __init__(
        self,
        *,
        world: World,
        encoder: Encoder,
        sampler: Sampler,
        reward: WeightedSum,
        rows: Rows,
        sampling: Sampling,
        seed: int,
    ) -> None:
        self.options = reward.canary
        self._world = world
        self._encoder = encoder
        self._sampler = sampler
        self._reward = reward
        self._rows = rows
        self._sampling = sampling
        self._seed = seed

    def due(self, step: int) -> bool:
        """Whether the responses are sampled after this step."""
        return step % self.options.every == 0

    def run(self, step: int, progress: Progress) -> CanaryResult:
        """The responses after a step, the same on every rank. A collective.

        Args:
            step: decides the seeds of the samples.
            progress: see `Evaluator.run`.
        """
        indices, samples = share(self._world, self._rows), self.options.samples
        rows, seed = [self._rows[index] for index in indices], row_seed(self._seed, step, samples)
        requests = [
            Request(prompt, [row_seed(seed, index, sample) for sample in range(samples)])
            for prompt, index in zip(self._encoder.prompts(rows), indices, strict=True)
        ]
        done, thoughts = itertools.count(1), self._encoder.thoughts
        with progress("canary tasks", len(self._rows) * samples) as show:
            completions = self._sampler.generate(requests, self._sampling, lambda *_: show(next(done)))
        texts = [completion.text for group in completions for completion in group]
        fields = [row | thoughts.entry(request.prompt) for row, request in zip(rows, requests, strict=True)]
        answered = [row for row in fields for _ in range(samples)]
        scores = self._reward.score(texts, answered)
        right = scores.accuracies(self._reward.accuracy_terms(answered)).clamp(0, 1).tolist()
        asked = [with_data_urls(row)["prompt"] for row in rows]
        records = [
            {
                "prompt": asked[number // samples],
                "response": text,
                "score": number_or_none(float(scores.total[number])),
            }
            | {"accuracy": number_or_none(right[number])}
            | term_scores({name: float(values[number]) for name, values in scores.terms.items()})
            for number, text in enumerate(texts)
        ]
        groups = {index: records[place * samples : (place + 1) * samples] for place, index in enumerate(indices)}
        found = [record for group in collect(self._world, groups, len(self._rows)) for record in group]
        found.sort(key=lambda record: math.inf if record["accuracy"] is None else -record["accuracy"])
        mean = mean_of_scored(math.nan if record["accuracy"] is None else record["accuracy"] for record in found)
        return CanaryResult(number_or_none(mean), found)

    def problem(self, result: CanaryResult) -> str:
        """Why a run stops whose canary tasks are rewarded, with some of the texts; empty if it does not stop."""
        if result.accuracy is None or result.accuracy <= self.options.bound:
            return ""
        shown = [
            ", ".join(f"{name} {_cut(value)}" for name, value in record.items())
            for record in result.texts[:SHOWN]
            if record["accuracy"]
        ]
        return "\n".join(
            [
                f"{CANARY}={result.accuracy:g} is above reward.canary.bound={self.options.bound:g}: responses to tasks "
                "that no honest response solves are right by the reward, which therefore can be exploited. A "
                "checkpoint and the texts (trajectories/) are saved. Repair the reward, or the rows of "
                "reward.canary.path:",
                *shown,
            ]
        )


def _cut(value: Any) -> str:
    if not isinstance(value, str):
        return f"{value:g}" if isinstance(value, float) else f"{value}"
    return repr(value[:LONGEST] + "..." if len(value) > LONGEST else value)
