"""Normalised scores against numbers worked by hand, in float64."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import SHAPINGS
from rft.algorithm.scores.shaping import RunningMoments, batch_norm, group_norm, normalized, running_norm

F64 = torch.float64
EMPTY = TensorDict()
CHOICES = [(True, True), (True, False), (False, True)]  # center, scale


def alone(tensor):
    return tensor


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("center", "scale"), CHOICES)
def test_running_norm_has_the_moments_of_all_steps_with_this_one(center, scale):
    state = RunningMoments()
    steps = [([1.0, 0.0], 0.5, math.sqrt(0.5)), ([4.0, 3.0], 2.0, math.sqrt(10 / 3))]
    for scores, mean, std in steps:
        found = running_norm(
            torch.tensor(scores, dtype=F64), EMPTY, all_sum=alone, state=state, center=center, scale=scale
        )
        close(found, [(score - mean * center) / (std + 1e-6 if scale else 1.0) for score in scores])


@pytest.mark.parametrize(("center", "scale"), CHOICES)
def test_batch_norm_has_the_moments_of_the_step(center, scale):
    scores, mean, std = [1.0, 2.0, 6.0], 3.0, math.sqrt((4 + 1 + 9) / 2)
    found = batch_norm(torch.tensor(scores, dtype=F64), EMPTY, all_sum=alone, center=center, scale=scale)
    close(found, [(score - mean * center) / (std + 1e-6 if scale else 1.0) for score in scores])


@pytest.mark.parametrize(("center", "scale"), CHOICES)
def test_group_norm_has_the_moments_of_the_prompt(center, scale):
    batch = TensorDict({"group": torch.tensor([5, 2, 5, 2, 9])}, batch_size=[5])
    scores = torch.tensor([1.0, 0.0, 3.0, 8.0, 4.0], dtype=F64)
    moments = [(2, math.sqrt(2)), (4, math.sqrt(32)), (2, math.sqrt(2)), (4, math.sqrt(32)), (4, None)]
    found = group_norm(scores, batch, center=center, scale=scale)
    expected = [
        (score - mean * center) / (std + 1e-6 if scale and std else 1.0)
        for score, (mean, std) in zip(scores.tolist(), moments, strict=True)
    ]
    close(found, expected)


@pytest.mark.parametrize("name", ["running_norm", "batch_norm", "group_norm"])
@pytest.mark.parametrize(("center", "expected"), [(True, 0.0), (False, 0.1)])
def test_equal_scores_are_not_divided(name, center, expected):
    """Their mean is not exactly 0.1: what is left would be divided by nearly nothing."""
    plugin = SHAPINGS.build({"name": name, "center": center, "scale": True}, "here")
    batch = TensorDict({"group": torch.zeros(7, dtype=torch.int64)}, batch_size=[7])
    scores, state = torch.full((7,), 0.1), RunningMoments()
    for _ in range(3):
        assert plugin(scores, batch, all_sum=alone, state=state).eq(torch.tensor(expected)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_that_differ_by_the_rounding_of_float32_are_equal(sign):
    scores = sign * torch.tensor([1000.0, 1000.0002], dtype=F64)
    mean, std = float(scores.mean()), float(scores.std())
    assert normalized(scores, mean, std, center=True, scale=True).tolist() == [0.0, 0.0]
    assert normalized(scores, mean, std, center=False, scale=True).tolist() == scores.tolist()
    assert normalized(scores, mean, 100 * std, center=True, scale=True).abs().min() > 1e-3


@pytest.mark.parametrize("name", ["running_norm", "batch_norm", "group_norm"])
def test_a_normalisation_that_changes_nothing_is_refused(name):
    with pytest.raises(ValueError, match=r"^here\.scale=false: with center=false it changes nothing; set one of them"):
        SHAPINGS.build({"name": name, "center": False, "scale": False}, "here")
