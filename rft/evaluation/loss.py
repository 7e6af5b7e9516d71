"""The loss of held-out texts: that of the algorithm, computed as in training. It needs no engine and no answers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from rft.actor.base import ColumnModel
from rft.algorithm.algorithm import Algorithm
from rft.algorithm.roles import POLICY
from rft.algorithm.step import StepContext, current_columns, prepare_batch, prepare_mini_batch
from rft.algorithm.trajectories import trajectories_of
from rft.batch.balance import Balance
from rft.batch.columns import lengths
from rft.data.base import GivenTexts, SourceContext
from rft.data.rows.lazy import Rows
from rft.distributed import SINGLE_PROCESS
from rft.evaluation.base import EvaluationContext, Evaluator, Progress, Texts
from rft.metrics import Metrics

LOSS, PERPLEXITY = "loss", "perplexity"


@dataclass(eq=False)
class LossEvaluator(Evaluator):
    """Computes the loss of held-out sets. A whole set is one mini-batch, so its denominators count the whole set.

    Attributes:
        context: see `EvaluationContext`. Its rows have the fields that the source reads.
        algorithm: its loss and its terms are evaluated.
        source: the source of the training batches, which makes the held-out batches, too.
        models: the policy and the models beside it whose columns the algorithm reads, by their keys.
        seed: of the run.
    """

    context: EvaluationContext
    algorithm: Algorithm
    source: GivenTexts
    models: Mapping[str, ColumnModel]
    seed: int
    _made: dict[str, TensorDict] = field(init=False, default_factory=dict)

    def run(self, progress: Progress) -> tuple[dict[str, float], Texts]:
        """There are no texts."""
        numbers: dict[str, float] = {}
        for name, rows in self.context.sets.items():
            with progress(f"evaluate {name}", len(rows)) as show:
                measured = self._measure(self._batch(name))
                numbers |= {f"eval/{name}/{metric}": value for metric, value in measured.items()}
                show(len(rows))
        return numbers, {}

    def batches(self) -> Iterator[TensorDict]:
        """One for each set."""
        return map(self._batch, self.context.sets)

    def _measure(self, batch: TensorDict) -> dict[str, float]:
        """The metrics of one set. A collective."""
        world, algorithm, temperature = self.context.world, self.algorithm, self.source.source.temperature
        balance = Balance(world, lengths, "unit", moves=False)
        step = StepContext(self.models, balance, world, batch, temperature, Metrics(), 1, self.seed)
        prepare_batch(algorithm, batch, step)
        current = current_columns(algorithm, batch, False, step)
        update = prepare_mini_batch(algorithm, batch, current, self.seed, step)[POLICY]
        outputs = step.compute(POLICY, batch, update.outputs)
        if "logprobs" in outputs and "old_logprobs" not in batch.keys():
            batch["old_logprobs"] = outputs["logprobs"]
        loss, _, statistics = update.objective(outputs, batch, trajectories_of(batch))
        metrics, keep = Metrics(), batch["loss_mask"]
        metrics.add(LOSS, loss, 1.0 / world.size)
        for name in algorithm.policy.terms[0].plugin.facts.statistics:
            values = statistics[name]
            metrics.mean(_short(name), values, keep if values.dim() > 1 else keep.any(-1))
        if PERPLEXITY in metric_names(algorithm):
            metrics.mean(PERPLEXITY, -outputs["logprobs"], keep)
        numbers = metrics.reduce(world.gather)
        if PERPLEXITY in numbers:
            numbers[PERPLEXITY] = math.exp(min(numbers[PERPLEXITY], 700.0))  # the largest exponent of a float is 709
        return numbers

    def _batch(self, name: str) -> TensorDict:
        """This rank's rows of a set: those of every n-th unit of n ranks, or one row that does not train."""
        if name not in self._made:
            self._made[name] = self._make(self.context.sets[name])
        return self._made[name].clone(recurse=False)

    def _make(self, rows: Rows) -> TensorDict:
        world, columns = self.context.world, tuple(sorted(self.algorithm.reads()))
        # One process draws each row once; with more, the rows of a step would have to divide over them.
        context = SourceContext(SINGLE_PROCESS, self.seed, self.context.encoder, rows, len(rows), columns, True)
        batch = self.source.build(context).next(Metrics())
        local = batch[batch["unit"] % world.size == world.rank]
        if not len(local):
            local = batch[:1].clone(recurse=False)
            local["response_mask"] = torch.zeros_like(local["response_mask"])
        return local


def metric_names(algorithm: Algorithm) -> list[str]:
    """The metrics of every set: the loss; the perplexity, for a loss per token; and the statistics of the loss."""
    facts: Any = algorithm.policy.terms[0].plugin.facts
    perplexity = [PERPLEXITY] if facts.unit == "token" and "logprobs" in facts.outputs else []
    return [LOSS, *perplexity, *map(_short, facts.statistics)]


def _short(name: str) -> str:
    """The name of a statistic without the part before its slash."""
    return name.rpartition("/")[2]
