"""The abstract classes of held-out evaluation and of canary tasks: evaluators, and the results of one on a set."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from tensordict import TensorDict
from torch import Tensor

from rft.batch.collate import collate
from rft.batch.row_fields import UNSCORED
from rft.batch.scores import number_or_none
from rft.data.base import GivenTexts
from rft.data.encode.encoder import Encoder
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.reward.route import SOURCE
from rft.sanitize import OTHER, Names

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
MOST_SOURCES = 1000  # of a set; the rows of others count as of one source, `other`
EVALUATED = "eval/"  # metrics of evaluations begin with it
NAMES_OF_MEAN = {"accuracy": "score", "score": "accuracy"}
Texts = dict[str, list[dict[str, Any]]]  # what was evaluated, for people to read, by the name of the set


@dataclass(frozen=True)
class EvaluationContext:
    """What a run gives to every evaluator.

    Attributes:
        world: the processes of the run; each evaluates its share of the rows.
        encoder: makes token ids of rows.
        sets: the held-out rows, by the name of their set.
    """

    world: World
    encoder: Encoder
    sets: dict[str, Rows]


def share(world: World, rows: Rows) -> list[int]:
    """The indices of the rows that this rank evaluates."""
    return list(range(world.rank, len(rows), world.size))


def collect(world: World, local: dict[int, Any], count: int) -> list[Any]:
    """The results of all rows in order, on every rank.

    Args:
        local: the results of this rank, by the index of their row.
        count: rows of the set.
    """
    results = {index: result for part in world.gather(local) for index, result in part.items()}
    return [results[index] for index in range(count)]


@dataclass
class SetResult(ABC):
    """The results of an evaluator on one set.

    Attributes:
        rows: of the set.
    """

    rows: Rows

    @abstractmethod
    def values(self, indices: Sequence[int]) -> dict[str, list[float]]:
        """The values of every metric on the rows with these indices; a metric without a value there is left out."""

    @abstractmethod
    def texts(self) -> list[dict[str, Any]]:
        """What was evaluated, for people to read: `{prompt, response, score}` and more."""

    def by_source(self) -> dict[str, dict[str, list[float]]]:
        """The values on the whole set under the name "", and on each of its data sources if it has several.

        A further number of a term, `<term>/<name>`, is left out of the whole set if a source has the term's name.
        """
        names = Names(f"the field {SOURCE!r}", most=MOST_SOURCES)
        sources = [names.spell(str(row.get(SOURCE, OTHER))) or OTHER for row in self.rows]
        several = sorted(set(sources)) if len(set(sources)) > 1 else []
        whole = self.values(range(len(sources)))
        values = {"": {name: numbers for name, numbers in whole.items() if name.rpartition("/")[0] not in several}}
        for source in several:
            values[source] = self.values([index for index, other in enumerate(sources) if other == source])
        return values


class Evaluator(ABC):
    """Evaluates a model on held-out sets.

    Attributes:
        samples: the engine answers the rows; it must hold the weights that are evaluated.
    """

    samples: ClassVar[bool] = False

    @abstractmethod
    def run(self, progress: Progress) -> tuple[dict[str, float], Texts]:
        """Evaluates every set; returns `eval/<set>/<metric>` and texts, the same on every rank. A collective.

        Args:
            progress: opens a progress bar (name, total) that is called with the number of rows that are done.
        """

    def config_entries(self) -> dict[str, float]:
        """What `run` has measured that config.json of the exported model keeps."""
        return {}

    def batches(self) -> Iterable[TensorDict]:
        """This rank's held-out batches of which precomputed models compute columns before training."""
        return ()


class RowEvaluator(Evaluator):
    """Evaluates a model row by row."""

    @abstractmethod
    def evaluate(self, progress: Progress) -> Mapping[str, SetResult]:
        """The result of every set by its name, the same on every rank. A collective; `progress` as in `run`."""

    def run(self, progress: Progress) -> tuple[dict[str, float], Texts]:
        """The metrics are those of `summary`; a collective, as of `Evaluator`."""
        results = self.evaluate(progress)
        return summary(results), {name: result.texts() for name, result in results.items()}


@dataclass(eq=False)
class ScoreEvaluator(RowEvaluator):
    """Evaluates a model with a score head.

    Attributes:
        fields: the fields of a row that it reads.
        metrics: those that every set has.
        context: see `EvaluationContext`. Its rows have the class's `fields`.
        scores: computes the column `score` (B, T) of rows; a collective.
        source: the options of the source of batches.
    """

    fields: ClassVar[tuple[str, ...]]
    metrics: ClassVar[tuple[str, ...]]
    context: EvaluationContext
    scores: Callable[[TensorDict], Tensor]
    source: Any

    @classmethod
    @abstractmethod
    def given(cls, source: Any) -> GivenTexts:
        """What makes the texts of a held-out row, where training has a source with these options."""

    def _on_all_ranks(
        self, name: str, rows: Rows, work: Callable[[Rows, Sequence[int]], Sequence[Any]], progress: Progress
    ) -> list[Any]:
        """What `work` returns for all rows of a set in order, on every rank.

        Each rank works on its share. A rank without rows works on the first row, since the forward is a collective.
        """
        indices = share(self.context.world, rows) or [0]
        with progress(f"evaluate {name}", len(rows)) as show:
            results = collect(self.context.world, dict(zip(indices, work(rows, indices), strict=True)), len(rows))
            show(len(rows))
        return results

    def _score(self, examples: Sequence[dict[str, Any]]) -> Tensor:
        """The column `score` (B, T) of some rows of a batch."""
        batch = collate(examples)
        batch["loss_mask"] = batch["response_mask"]
        return self.scores(batch)


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


class Canary(ABC):
    """The canary tasks of a run, which are answered while it trains."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Whether the responses are sampled after this step."""

    @abstractmethod
    def run(self, step: int, progress: Progress) -> CanaryResult:
        """The responses after a step, the same on every rank. A collective; `progress` as in `Evaluator.run`."""

    @abstractmethod
    def problem(self, result: CanaryResult) -> str:
        """Why a run stops whose canary tasks are rewarded, with some of the texts; empty if it does not stop."""


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of the values, and its standard error over prompts."""
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean, math.sqrt(spread / len(values))


def summary(results: Mapping[str, SetResult]) -> dict[str, float]:
    """`eval/<set>/<metric>` and, if a set has rows of several sources, `eval/<set>/<source>/<metric>`.

    A metric is the mean of its values; each but the length and the share of unscored answers has a `_stderr`.
    """
    metrics: dict[str, float] = {}
    for name, result in results.items():
        for source, by_metric in result.by_source().items():
            prefix = f"eval/{name}/{source}/" if source else f"eval/{name}/"
            for metric, values in by_metric.items():
                metrics[f"{prefix}{metric}"], error = mean_and_error(values)
                if metric not in ("length", UNSCORED):
                    metrics[f"{prefix}{metric}_stderr"] = error
    return metrics


def other_name(metric: str) -> str | None:
    """The other name of the mean of the accuracy's term: where its values are no accuracies, it is `score`."""
    path, _, name = metric.rpartition("/")
    return f"{path}/{NAMES_OF_MEAN[name]}" if name in NAMES_OF_MEAN else None


def measured(numbers: Mapping[str, float], metric: str) -> float | None:
    """The value of the metric that a run watches, under either of its names; None if it was not measured."""
    return numbers.get(metric, numbers.get(other_name(metric) or metric))


def updated(last: Mapping[str, float], numbers: Mapping[str, float]) -> dict[str, float]:
    """The last numbers of a run behind a step with these numbers; of an earlier evaluation than its last, none."""
    evaluated = any(name.startswith(EVALUATED) for name in numbers)
    kept = {name: value for name, value in last.items() if not (evaluated and name.startswith(EVALUATED))}
    return kept | dict(numbers)


def metric_value(numbers: Mapping[str, float], metric: str) -> float:
    """The value of the metric that a run returns.

    Raises:
        ValueError: it was not measured, because no answer has a score.
    """
    value = measured(numbers, metric)
    if value is None:
        raise ValueError(
            f"metric={metric} was not measured, because no answer has a score; with reward.call.failed=stop, or this "
            "value in the term's own `call`, the run stops at the first failure and shows the error"
        )
    return value


def term_scores(terms: Mapping[str, float]) -> dict[str, float | None]:
    """What a record of an answer says about its reward terms: the raw value of each, if there are several."""
    return {f"reward/{name}": number_or_none(value) for name, value in terms.items()} if len(terms) > 1 else {}
