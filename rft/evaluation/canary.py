"""Canary tasks: no honest response solves them, so a policy that solves one exploits a mistake of the reward."""

import math
from dataclasses import dataclass
from typing import Any

from rft.batch.scores import mean_of_scored, number_or_none
from rft.data.encode.encoder import Encoder
from rft.data.encode.media.normal import with_data_urls
from rft.data.row_checks import check_rows
from rft.data.rows.lazy import Rows
from rft.data.rows.sources import FileRows
from rft.distributed import World
from rft.evaluation.base import Canary, CanaryResult, Progress, collect, share, term_scores
from rft.logger.history import CANARY
from rft.metrics import Metrics
from rft.reward.compose import WeightedSum
from rft.rollout.answerer import RowRequests, SingleTurn
from rft.rollout.engine.base import row_seed
from rft.rollout.engine.sampling import Sampling
from rft.rollout.sampler import Sampler

SHOWN = 3  # responses in a message
LONGEST = 400  # characters of a text in a message


@dataclass(frozen=True)
class CanaryProbe(Canary):
    """Samples responses to canary tasks as training samples, and scores them. They are in no batch and train nothing.

    Attributes:
        world: the processes of the run; each answers its share of the tasks.
        encoder: makes token ids of rows.
        sampler: holds the weights of the policy.
        reward: scores the responses; its options `canary` say how many, when, and which accuracy is too high.
        rows: the tasks.
        sampling: how training samples.
        seed: of the run.
    """

    world: World
    encoder: Encoder
    sampler: Sampler
    reward: WeightedSum
    rows: Rows
    sampling: Sampling
    seed: int

    def due(self, step: int) -> bool:
        return step % self.reward.canary.every == 0

    def run(self, step: int, progress: Progress) -> CanaryResult:
        """The step decides the seeds of the samples."""
        indices, samples = share(self.world, self.rows), self.reward.canary.samples
        rows, seed = [self.rows[index] for index in indices], row_seed(self.seed, step, samples)
        seeds = [[row_seed(seed, index, sample) for sample in range(samples)] for index in indices]
        asked, answerer = RowRequests(rows, seeds, self.sampling), SingleTurn(self.encoder, self.sampler)
        with progress("canary tasks", len(self.rows) * samples) as show:
            groups, scores = answerer.answer_and_score(asked, self.reward.begin(), Metrics(), show)
        answers = [answer for group in groups for answer in group]
        terms = self.reward.accuracy_terms([answer.fields for answer in answers])
        right = scores.accuracies(terms).clamp(0, 1).tolist()
        prompts = [with_data_urls(row)["prompt"] for row in rows]
        records = [
            {
                "prompt": prompts[number // samples],
                "response": answer.text,
                "score": number_or_none(float(scores.total[number])),
                "accuracy": number_or_none(right[number]),
            }
            | term_scores({name: float(values[number]) for name, values in scores.terms.items()})
            for number, answer in enumerate(answers)
        ]
        local = {index: records[place * samples : (place + 1) * samples] for place, index in enumerate(indices)}
        texts = [record for group in collect(self.world, local, len(self.rows)) for record in group]
        texts.sort(key=lambda record: math.inf if record["accuracy"] is None else -record["accuracy"])
        mean = mean_of_scored(math.nan if record["accuracy"] is None else record["accuracy"] for record in texts)
        return CanaryResult(number_or_none(mean), texts)

    def problem(self, result: CanaryResult) -> str:
        bound = self.reward.canary.bound
        if result.accuracy is None or result.accuracy <= bound:
            return ""
        shown = [
            ", ".join(f"{name} {_cut(value)}" for name, value in record.items())
            for record in result.texts[:SHOWN]
            if record["accuracy"]
        ]
        return "\n".join(
            [
                f"{CANARY}={result.accuracy:g} is above reward.canary.bound={bound:g}: responses to tasks "
                "that no honest response solves are right by the reward, which therefore can be exploited. A "
                "checkpoint and the texts (trajectories/) are saved. Repair the reward, or the rows of "
                "reward.canary.path:",
                *shown,
            ]
        )


def load_tasks(reward: WeightedSum) -> Rows:
    """The tasks of a reward's options `canary`, whose rows need no response that is right."""
    path, columns = reward.canary.path, reward.canary.columns
    assert path is not None
    rows = FileRows(path, columns, None, None, "reward.canary").load(["prompt", *reward.fields])
    check_rows(rows, reward.check_row)
    return rows


def _cut(value: Any) -> str:
    if not isinstance(value, str):
        return f"{value:g}" if isinstance(value, float) else f"{value}"
    return repr(value[:LONGEST] + "..." if len(value) > LONGEST else value)
