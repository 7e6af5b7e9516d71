"""Estimators of a model's accuracy from answers to held-out prompts: means, pass@k, maj@k, and their errors."""

import math
from collections import Counter
from collections.abc import Sequence

from rft.batch.scores import mean_of_scored
from rft.evaluation.base import mean_and_error
from rft.evaluation.generation import NAN, PromptAnswers

Z = 1.959963984540054  # two-sided 95 % of the normal distribution


def interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the mean over prompts.

    For values that are all 0 or 1 it is Wilson's interval (1927), which holds for few prompts and near 0 and 1. For
    others it is the normal interval, clipped to [0, 1] if all values lie in it.
    """
    n = len(values)
    mean, error = mean_and_error(values)
    if set(values) <= {0.0, 1.0}:
        weight = Z * Z / n
        middle = (mean + weight / 2) / (1 + weight)
        half = math.sqrt(mean * (1 - mean) * weight + weight * weight / 4) / (1 + weight)
        return max(0.0, middle - half), min(1.0, middle + half)
    low, high = mean - Z * error, mean + Z * error
    if min(values) >= 0 and max(values) <= 1:
        return max(0.0, low), min(1.0, high)
    return low, high


def sample_metrics(samples: Sequence[PromptAnswers], pass_k: list[int], maj_k: list[int]) -> dict[str, list[float]]:
    """The value of each metric of sampled answers for every prompt.

    Args:
        samples: the answers to each prompt, as many of each.
        pass_k, maj_k: see `GenerationOptions`.
    """
    right = [answers.right for answers in samples]
    solved = [[value == 1.0 for value in row if not math.isnan(value)] for row in right]
    votes = [
        [text for text, value in zip(answers.extracted, row, strict=True) if not math.isnan(value)]
        for answers, row in zip(samples, right, strict=True)
    ]
    metrics = {f"mean@{len(right[0])}": [mean_of_scored(row) for row in right]}
    for k in pass_k:
        metrics[f"pass@{k}"] = [pass_at_k(len(row), sum(row), k) if len(row) >= k else NAN for row in solved]
    for k in maj_k:
        pairs = zip(votes, solved, strict=True)
        metrics[f"maj@{k}"] = [maj_at_k(vote, row, k) if len(row) >= k else NAN for vote, row in pairs]
    return metrics


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of k samples is right (Chen et al., 2107.03374).

    Args:
        n: samples drawn, at least k.
        correct: the number of right ones.
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def maj_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Unbiased estimate of the probability that the answer which most of k samples give is right (2203.11171).

    It is the mean over all subsets of k of the n samples. If t answers have the most votes, each wins in one of t
    cases. A sample without an answer has no vote; a subset without votes counts as wrong.

    Args:
        answers: of the n samples, None if a sample gives none.
        right: whether each sample is right; the same for equal answers.
        k: at most n.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    good = {answer for answer, is_right in zip(answers, right, strict=True) if is_right and answer is not None}
    silent = len(answers) - votes.total()
    won = sum(_wins(votes[answer], [votes[other] for other in votes if other != answer], silent, k) for answer in good)
    return won / math.comb(len(answers), k)


def _wins(own: int, others: list[int], silent: int, k: int) -> float:
    """The number of subsets of k in which an answer with `own` votes wins; a tie of t counts 1 / t."""
    won = 0.0
    for most in range(1, min(own, k) + 1):
        left = k - most
        ways = {(0, 0): 1}  # {(votes of the others, how many of them are tied with it): subsets of the others}
        for count in others:
            grown: Counter[tuple[int, int]] = Counter()
            for (used, tied), number in ways.items():
                for given in range(min(count, most, left - used) + 1):
                    grown[used + given, tied + (given == most)] += number * math.comb(count, given)
            ways = grown
        shares = sum(n * math.comb(silent, left - used) / (1 + tied) for (used, tied), n in ways.items())
        won += math.comb(own, most) * shares
    return won
