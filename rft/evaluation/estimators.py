"""Estimators of a model's accuracy from answers to held-out prompts: means, pass@k, maj@k, and their errors."""

import math
from collections import Counter
from collections.abc import Sequence

Z = 1.959963984540054  # two-sided 95 % of the normal distribution


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of the values, and its standard error over prompts."""
    mean = sum(values) / len(values)
    spread = sum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return mean, math.sqrt(spread / len(values))


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
