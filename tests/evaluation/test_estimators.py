"""Numbers of held-out sets and how sure they are, by hand and by enumeration."""

import itertools
import math
from collections import Counter

import pytest

from rft.evaluation.base import mean_and_error
from rft.evaluation.estimators import interval, maj_at_k, pass_at_k


def test_the_error_of_a_mean_by_hand():
    # mean 2; squares 1 + 0 + 1 over 2 = 1; sqrt(1 / 3)
    assert mean_and_error([1.0, 2.0, 3.0]) == pytest.approx((2.0, math.sqrt(1 / 3)))
    assert mean_and_error([0.5]) == (0.5, 0.0)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_answer(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [1] * correct + [0] * (n - correct)
        subsets = [any(chosen) for chosen in itertools.combinations(answers, k)]
        assert pass_at_k(n, correct, k) == pytest.approx(sum(subsets) / len(subsets))


@pytest.mark.parametrize(
    ("answers", "k", "expected"),
    [
        # all four: 7 has two votes, 8 and 9 one each
        (["7", "8", "7", "9"], 4, 1.0),
        # of the six pairs one is 7 7 and wins; four are a 7 and another, a tie of two; one has no 7: (1 + 4 / 2) / 6
        (["7", "8", "7", "9"], 2, 0.5),
        # one alone: two of four are right
        (["7", "8", "7", "9"], 1, 0.5),
        # three answers tied
        (["7", "8", "9"], 3, 1 / 3),
        # no vote of the silent: 7 wins alone, and where nobody speaks nothing wins
        (["7", None, None], 3, 1.0),
        (["7", None, None], 1, 1 / 3),
        ([None, None], 2, 0.0),
        # the wrong one has more votes
        (["8", "7", "8"], 3, 0.0),
    ],
)
def test_majority_votes_by_hand(answers, k, expected):
    assert maj_at_k(answers, [answer == "7" for answer in answers], k) == pytest.approx(expected, abs=1e-15)


def winner_by_hand(answers, good):
    votes = Counter(answer for answer in answers if answer is not None)
    most = [answer for answer, count in votes.items() if count == max(votes.values())]
    return sum(answer in good for answer in most) / len(most) if most else 0.0


@pytest.mark.parametrize("text", ["aabbc", "aaabbbcc", "ab.c.aab", "abcdefgh", "aaaa", "..a..bb", "aabb.cca"])
@pytest.mark.parametrize("good", ["a", "ac", ""])
def test_majority_votes_are_the_mean_over_all_subsets(text, good):
    answers = [None if letter == "." else letter for letter in text]
    right = [answer is not None and answer in good for answer in answers]
    for k in range(1, len(answers) + 1):
        subsets = [winner_by_hand(chosen, good) for chosen in itertools.combinations(answers, k)]
        assert maj_at_k(answers, right, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_a_majority_of_many_samples_is_quick_and_exact():
    """One of two answers: the tail of a hypergeometric distribution."""
    n, good, k = 128, 60, 33
    answers = ["a"] * good + ["b"] * (n - good)
    ways = [math.comb(good, votes) * math.comb(n - good, k - votes) for votes in range(17, k + 1)]
    found = maj_at_k(answers, [answer == "a" for answer in answers], k)
    assert found == pytest.approx(sum(ways) / math.comb(n, k), rel=1e-12)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [
        # z^2 = 3.841459; (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)
        (5, 10, 0.2365931, 0.7634069),
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (1, 1, 0.2065493, 1.0),
    ],
)
def test_the_interval_of_a_share_is_wilsons(right, n, low, high):
    assert interval([1.0] * right + [0.0] * (n - right)) == pytest.approx((low, high), abs=1e-7)


def test_the_interval_of_other_values_is_the_normal_one():
    # mean 2, standard error sqrt(1 / 3)
    half = 1.959963984540054 * math.sqrt(1 / 3)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - half, 2 + half))
    assert interval([5.0]) == (5.0, 5.0)


def test_the_interval_of_values_between_0_and_1_stays_there():
    low, high = interval([0.0, 0.0, 0.5])
    assert low == 0.0 and high == pytest.approx(1 / 6 + 1.959963984540054 / 6)
    assert interval([1.0, 1.0, 0.5])[1] == 1.0
