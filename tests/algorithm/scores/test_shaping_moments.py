"""Moments of a stream against those of all its numbers together."""

import math
import random

import pytest

from rft.algorithm.scores.shaping import RunningMoments


def add(moments, *numbers):
    mean = sum(numbers) / len(numbers)
    moments.update(len(numbers), mean, sum((number - mean) ** 2 for number in numbers))


def test_moments_by_hand():
    moments = RunningMoments()
    add(moments, 1.0, 0.0)
    assert moments.numbers() == {"mean": 0.5, "std": math.sqrt(0.5)}
    add(moments, 4.0, 3.0)
    assert (moments.count, moments.mean, moments.squares) == (4, 2.0, 10.0)  # 1 + 4 + 4 + 1
    assert moments.std == math.sqrt(10 / 3)


def test_a_single_number_has_no_deviation():
    moments = RunningMoments()
    add(moments, 7.0)
    assert moments.numbers() == {"mean": 7.0, "std": 0.0}


def test_nothing_added_changes_nothing():
    moments = RunningMoments()
    moments.update(0, 0.0, 0.0)
    assert moments.numbers() == {"mean": 0.0, "std": 0.0}
    add(moments, 1.0, 3.0)
    before = moments.state_dict()
    moments.update(0, 0.0, 0.0)
    assert moments.state_dict() == before


def test_many_parts_are_as_one_whole():
    """Far from 0, where the difference of squares would lose every digit."""
    draws = random.Random(0)
    numbers = [1e6 + draws.gauss(0, 1e-3) for _ in range(999)]
    moments, whole = RunningMoments(), RunningMoments()
    for start in range(0, 999, 3):
        add(moments, *numbers[start : start + 3])
    add(whole, *numbers)
    assert moments.mean == pytest.approx(whole.mean, rel=1e-14)
    assert moments.std == pytest.approx(whole.std, rel=1e-6)


def test_the_state_comes_back():
    moments, other = RunningMoments(), RunningMoments()
    add(moments, 0.1, 0.7, 0.2)
    other.load_state_dict(moments.state_dict())
    add(moments, 1.1)
    add(other, 1.1)
    assert other.state_dict() == moments.state_dict()
