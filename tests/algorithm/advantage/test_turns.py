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


def test_no_rows():
    assert gigpo("group", order=slice(0)).shape == (0, 5)
