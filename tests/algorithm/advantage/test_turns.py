"""The advantages of single turns."""

import math

import pytest
import torch

from rft.algorithm import ADVANTAGES
from rft.algorithm.scores.rewards import token_rewards
from tests.helpers import batch_of

TURN = torch.tensor([[0, 1, 0, 2, 2], [0, 1, 2, 0, 0], [0, 1, 1, 0, 0]])
ANCHOR = torch.tensor([[0, 11, 0, 22, 22], [0, 11, 0, 0, 0], [0, 11, 11, 0, 0]])
SCORES = torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)


def gigpo(scale, order=slice(None), keep=TURN > 0, **changes):
    columns = {"turn": TURN, "anchor": ANCHOR} | changes
    batch = batch_of(keep, torch.tensor([4, 4, 9]), **columns)[order]
    rewards = token_rewards(SCORES, keep, None, 0.0)[1][order]
    plugin = ADVANTAGES.build({"name": "gigpo", "omega": 2.0, "discount": 0.5, "scale": scale}, "advantage")
    return plugin(SCORES[order], rewards, batch)["advantages"]


@pytest.mark.parametrize(("scale", "row", "step"), [("none", 0.5, 0.25), ("group", math.sqrt(0.5), math.sqrt(0.5))])
def test_gigpo_by_hand(scale, row, step):
    """The returns of the turns are 0.5 and 1, and 0 and 0. The first turns share a state; the second ones have none
    in common. The third row is of another prompt.
    """
    first = row + 2 * step
    expected = torch.tensor([[0, first, 0, row, row], [0, -first, -row, 0, 0], [0.0] * 5], dtype=torch.float64)
    torch.testing.assert_close(gigpo(scale), expected, rtol=0, atol=5e-6)  # + 1e-6 in the denominators


def test_a_state_that_comes_again_is_compared_with_itself():
    """The returns in the state are 0.5, 1, 0: their mean is 0.5."""
    anchor = torch.where(ANCHOR == 22, 11, ANCHOR)
    expected = torch.tensor([[0, 0.5, 0, 1.5, 1.5], [0, -1.5, -0.5, 0, 0], [0.0] * 5], dtype=torch.float64)
    torch.testing.assert_close(gigpo("none", anchor=anchor), expected, rtol=0, atol=1e-12)


def test_turns_without_a_trained_token_have_no_return():
    keep = torch.tensor([[0, 0, 0, 1, 0], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0]]).bool()
    expected = torch.tensor([[0, 0, 0, 0.5, 0], [0, -0.5, -0.5, 0, 0], [0.0] * 5], dtype=torch.float64)
    torch.testing.assert_close(gigpo("none", keep=keep), expected, rtol=0, atol=1e-12)


def hgpo(scale, history, alpha=1.0, order=slice(None)):
    """Three trajectories of three turns, in the states a b c, a b c and d b c."""
    turn = torch.tensor([[0, 1, 2, 3]] * 3)
    anchor = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 4, 2, 3]])
    keep = turn > 0
    batch = batch_of(keep, torch.tensor([4, 4, 4]), turn=turn, anchor=anchor)[order]
    scores = torch.tensor([1.0, 0.0, 5.0], dtype=torch.float64)
    rewards = token_rewards(scores, keep, None, 0.0)[1][order]
    options = {"name": "hgpo", "history": history, "alpha": alpha, "discount": 1.0, "scale": scale}
    return ADVANTAGES.build(options, "advantage")(scores[order], rewards, batch)["advantages"]


@pytest.mark.parametrize(
    ("history", "alpha", "second", "third"),
    [
        (0, 1.0, (-1.0, -2.0, 3.0), (-1.0, -2.0, 3.0)),  # all three: 1, 0 and 5 less their mean 2
        # a b of two: 1 and 0 less 0.5, which count twice; d b of one counts nothing. b c is of all three.
        (1, 1.0, (0.0, -1.0, 3.0), (-1.0, -2.0, 3.0)),
        (2, 1.0, (0.0, -1.0, 3.0), (-0.25, -1.25, 3.0)),  # a b c of two counts 3 of 6
        (2, 0.0, (-0.25, -1.25, 3.0), (-0.5, -1.5, 3.0)),
    ],
)
def test_hgpo_by_hand(history, alpha, second, third):
    first = (0.5, -0.5, 0.0)
    expected = torch.tensor([[0.0] * 3, first, second, third], dtype=torch.float64).T
    torch.testing.assert_close(hgpo("none", history, alpha), expected, rtol=0, atol=1e-12)


def test_hgpo_divides_by_the_deviation_of_what_is_compared():
    two, three = math.sqrt(0.5), math.sqrt(7.0)  # of 1 and 0, and of 1, 0 and 5
    second = (-1 / three + 2 * 0.5 / two) / 3
    assert hgpo("group", 1)[0, 1:].tolist() == pytest.approx([0.5 / two, second, -1 / three], abs=1e-5)


def test_no_rows():
    assert gigpo("group", order=slice(0)).shape == (0, 5)
    assert hgpo("group", 2, order=slice(0)).shape == (0, 4)
