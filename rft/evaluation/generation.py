"""Held-out prompts that the model answers: greedy accuracy, mean of n samples, unbiased pass@k and maj@k."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rft.batch.row_fields import EPISODE, EPISODE_FIELD, PROMPT_OPENS, UNSCORED
from rft.batch.scores import ACCURACY, Scores, number_or_none
from rft.data.rows.lazy import Rows
from rft.distributed import World
from rft.evaluation.base import EvaluationContext, Progress, RowEvaluator, SetResult, collect, share, term_scores
from rft.imports import import_part
from rft.metrics import Metrics
from rft.reward.compose import WeightedSum
from rft.rollout.answerer import Answerer, RowRequests
from rft.rollout.engine.base import row_seed
from rft.rollout.engine.sampling import Sampling
from rft.sanitize import warn_once

NAN = math.nan  # of a prompt with too few scored answers; it is in no mean


@dataclass
class PromptAnswers:
    """Some answers to one prompt.

    Attributes:
        texts: of the answers.
        tokens: their numbers of tokens; empty if they are not known.
        extracted: the final answer that each text gives, None if it gives none.
        right: the accuracy of every answer, see `Scores.accuracies`.
        scores: the value of its term of the accuracy on every answer.
        terms: the value of each reward term on every answer.
        numbers: each further number of the terms on every answer, by `<term>/<name>`.
        episode: the record of the first one, if it is an episode.
        prompt_opens: of every answer, the mark of the thought in which its prompt ends, or None.
    """

    texts: list[str]
    tokens: list[int]
    extracted: list[str | None]
    right: list[float]
    scores: list[float]
    terms: dict[str, list[float]]
    numbers: dict[str, list[float]]
    episode: dict[str, Any] | None
    prompt_opens: list[str | None]


@dataclass
class GenerationResult(SetResult):
    """The answers to a held-out set, prompt by prompt, with their metrics.

    Attributes:
        greedy: one answer each; empty if only sampled answers are known.
        samples: the sampled answers, as many of each prompt; empty if there are none.
        metrics: the value of each metric for every prompt; see `with_metrics`.
    """

    greedy: list[PromptAnswers]
    samples: list[PromptAnswers]
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def values(self, indices: Sequence[int]) -> dict[str, list[float]]:
        values = {
            name: [number for index in indices if not math.isnan(number := numbers[index])]
            for name, numbers in self.metrics.items()
        }
        return {name: numbers for name, numbers in values.items() if numbers}

    def texts(self) -> list[dict[str, Any]]:
        """The greedy answers; none if only sampled ones are known."""
        if not self.greedy:
            return []
        return [
            {"prompt": row["prompt"], "response": answers.texts[0], "score": number_or_none(answers.right[0])}
            | term_scores({name: values[0] for name, values in answers.terms.items()})
            | ({} if answers.episode is None else {EPISODE: answers.episode})
            for row, answers in zip(self.rows, self.greedy, strict=True)
        ]


@dataclass(frozen=True)
class GenerationOptions:
    """How answers are drawn and counted.

    Attributes:
        greedy: how the one greedy answer is drawn.
        sampling: how the sampled answers are drawn.
        samples: sampled answers per prompt, for mean@n, pass@k and maj@k; 0 for greedy accuracy alone.
        pass_k, maj_k: the k of pass@k and maj@k.
        seed: of the samples; the same in every evaluation.
    """

    greedy: Sampling
    sampling: Sampling
    samples: int
    pass_k: list[int]
    maj_k: list[int]
    seed: int


@dataclass(frozen=True)
class GenerationEvaluator(RowEvaluator):
    """Answers held-out prompts and scores the answers.

    Attributes:
        context: see `EvaluationContext`.
        answerer: answers the prompts with the weights that are evaluated.
        reward: scores the answers; its term `accuracy` says which are right, see `prompt_metrics`.
        options: how answers are drawn and counted.
    """

    samples: ClassVar[bool] = True
    context: EvaluationContext
    answerer: Answerer
    reward: WeightedSum
    options: GenerationOptions

    def evaluate(self, progress: Progress) -> dict[str, GenerationResult]:
        options, results = self.options, {}
        for name, rows in self.context.sets.items():
            with progress(f"evaluate {name}", len(rows)) as show:
                greedy = self._answer(rows, options.greedy, 1, show)
            samples = []
            if options.samples:
                with progress(f"sample {name}", len(rows) * options.samples) as show:
                    samples = self._answer(rows, options.sampling, options.samples, show)
            results[name] = GenerationResult(rows, greedy, samples)
        return with_metrics(results, self.reward.accuracy, options.pass_k, options.maj_k, self.context.world)

    def _answer(
        self, rows: Rows, sampling: Sampling, samples: int, progress: Callable[[int], None]
    ) -> list[PromptAnswers]:
        """Answers of all rows in order, on every rank; each rank answers its share."""
        indices = share(self.context.world, rows)
        asked = [rows[index] for index in indices]
        seeds = [[row_seed(self.options.seed, index, sample) for sample in range(samples)] for index in indices]
        requests = RowRequests(asked, seeds, sampling)
        groups, scores = self.answerer.answer_and_score(requests, self.reward.begin(), Metrics(), progress)
        answered = [trajectory.fields for group in groups for trajectory in group]
        texts = [[trajectory.text for trajectory in group] for group in groups]
        tokens = [[trajectory.sampled_tokens for trajectory in group] for group in groups]
        answers = split_answers(self.reward, answered, texts, tokens, scores)
        return collect(self.context.world, dict(zip(indices, answers, strict=True)), len(rows))


def split_answers(
    reward: WeightedSum,
    answered: Rows,
    texts: Sequence[list[str]],
    tokens: Sequence[list[int]],
    scores: Scores,
) -> list[PromptAnswers]:
    """The answers to each of P prompts, from the scores of all N answers.

    Args:
        answered: the row of every answer, with the record of its episode if it is one.
        texts: the answers to each prompt.
        tokens: their numbers of tokens; empty where they are not known.
    """
    flat, names = [text for group in texts for text in group], reward.accuracy_terms(answered)
    extracted, right, values = reward.extract(flat, answered), scores.accuracies(names), scores.values(names)
    answers, start = [], 0
    for group, counts in zip(texts, tokens, strict=True):
        part = slice(start, start + len(group))
        answers.append(
            PromptAnswers(
                texts=group,
                tokens=counts,
                extracted=extracted[part],
                right=right[part].tolist(),
                scores=values[part].tolist(),
                terms={name: column[part].tolist() for name, column in scores.terms.items()},
                numbers={name: column[part].tolist() for name, column in scores.numbers.items()},
                episode=answered[start].get(EPISODE_FIELD),
                prompt_opens=[row.get(PROMPT_OPENS) for row in answered[part]],
            )
        )
        start = part.stop
    return answers


def with_metrics(
    results: dict[str, GenerationResult], accuracy: str, pass_k: list[int], maj_k: list[int], world: World
) -> dict[str, GenerationResult]:
    """Adds the metrics to the results. Rank 0 logs once that values of the accuracy are no accuracies.

    Args:
        results: of all sets by their names, the same on every rank.
        accuracy, pass_k, maj_k: see `prompt_metrics`.
    """
    prompts = [prompt for result in results.values() for prompt in (*result.greedy, *result.samples)]
    outside = any(value < 0 or value > 1 for prompt in prompts for value in prompt.right)
    if outside and world.rank == 0:
        warn_once(
            f"reward.accuracy={accuracy}: values below 0 or above 1 are no accuracies, so evaluations report "
            "eval/<set>/score, the mean of these values; for an accuracy return {score, acc} from the function or name "
            "another term"
        )
    for result in results.values():
        result.metrics = prompt_metrics(result.greedy, result.samples, accuracy, not outside, pass_k, maj_k)
    return results


def prompt_metrics(
    greedy: list[PromptAnswers],
    samples: list[PromptAnswers],
    accuracy: str,
    is_accuracy: bool,
    pass_k: list[int],
    maj_k: list[int],
) -> dict[str, list[float]]:
    """The value of each metric for every prompt.

    Args:
        greedy, samples: see `GenerationResult`.
        accuracy: the term of the reward that says which answers are right.
        is_accuracy: every accuracy is from 0 to 1; otherwise the mean is called `score`.
        pass_k, maj_k: see `GenerationOptions`.
    """
    metrics: dict[str, list[float]] = {}
    if greedy:
        right, scores = ([getattr(answers, part)[0] for answers in greedy] for part in ("right", "scores"))
        if is_accuracy:
            metrics["accuracy"] = right
        if not is_accuracy or any(answers.right != answers.scores for answers in greedy):
            metrics["score"] = scores
        for term in greedy[0].terms:
            if term != accuracy:
                metrics[term] = [answers.terms[term][0] for answers in greedy]
        for name in dict.fromkeys(name for answers in greedy for name in answers.numbers):
            if name != f"{accuracy}/{ACCURACY}":
                metrics[name] = [answers.numbers[name][0] if name in answers.numbers else NAN for answers in greedy]
        missing = [float(math.isnan(value)) for value in right]
        if any(missing):
            metrics[UNSCORED] = missing
        if all(answers.tokens for answers in greedy):
            metrics["length"] = [float(answers.tokens[0]) for answers in greedy]
    if samples:
        sample_metrics = import_part("rft.evaluation.estimators", "sample_metrics", "eval.samples")
        metrics |= sample_metrics(samples, pass_k, maj_k)
    return metrics


def metric_names(terms: Iterable[str], accuracy: str, samples: int, pass_k: list[int], maj_k: list[int]) -> list[str]:
    """The metrics of every set, without their standard errors.

    Args:
        terms: of the reward.
        accuracy: the term among them that says which answers are right.
        samples, pass_k, maj_k: see `GenerationOptions`.
    """
    passed, voted = [f"pass@{k}" for k in pass_k], [f"maj@{k}" for k in maj_k]
    sampled = [f"mean@{samples}", *passed, *voted] if samples else []
    return ["accuracy", *(term for term in terms if term != accuracy), "length", *sampled]
