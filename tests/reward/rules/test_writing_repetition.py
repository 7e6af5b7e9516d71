"""The share of repeated n-grams, counted by hand."""

import pytest

from rft.registry import Plugin
from rft.reward import REWARDS


def rule(size: int, unit: str = "words") -> Plugin:
    return REWARDS.build({"name": "repetition", "size": size, "unit": unit}, "reward.terms.repetition")


@pytest.mark.parametrize(
    ("response", "size", "value"),
    [
        ("a b c d", 2, 0.0),
        ("a b a b a b", 2, -3 / 5),  # ab ba ab ba ab
        ("A b a B", 2, -1 / 3),  # ab ba ab
        ("no no no no no", 1, -4 / 5),
        ("no no no no no", 3, -2 / 3),
        ("x\ny  x y", 2, -1 / 3),  # xy yx xy
        ("no no", 3, 0.0),
        ("no no no", 3, 0.0),  # one n-gram
        ("", 1, 0.0),
    ],
)
def test_words(response: str, size: int, value: float) -> None:
    assert rule(size)(response, {}) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("response", "size", "value"),
    [
        ("好的好的好的", 2, -3 / 5),
        ("好 的\n好的", 2, -1 / 3),  # white space is no character
        ("abab", 2, -1 / 3),
        ("abc", 4, 0.0),
    ],
)
def test_characters(response: str, size: int, value: float) -> None:
    assert rule(size, "characters")(response, {}) == pytest.approx(value, abs=1e-12)


def test_more_repetition_approaches_minus_one() -> None:
    assert -1.0 < rule(3)("so " * 10_000, {}) < -0.999


@pytest.mark.parametrize("size", [0, 101])
def test_a_size_out_of_its_range(size: int) -> None:
    with pytest.raises(ValueError, match=rf"^reward\.terms\.repetition\.size={size}: it must be"):
        rule(size)
