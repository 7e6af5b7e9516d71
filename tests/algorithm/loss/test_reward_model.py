"""The losses of reward models: numbers and gradients by hand; what a pair is, and what is none."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.loss.reward_model import bradley_terry, score_centering

F64 = torch.float64
# Scores stand at the last trained token; a pair is a unit, in any order. The last row has lost its partner.
KEEP = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 1, 1], [0, 0, 1], [0, 1, 1]], dtype=torch.bool)
LAST = [2, 1, 2, 2, 2]
UNIT = torch.tensor([7, 2, 2, 7, 4])
CHOSEN = torch.tensor([True, False, True, False, True])
SCORES = [1.5, 2.0, -1.0, 0.5, 3.0]
GAPS = [1.0, -3.0, -3.0, 1.0]  # of the pair of each of the first four rows


def run(loss, scores=SCORES, keep=KEEP, margins=None, **options):
    """Losses, the gradient of their sum by the score of each row, and the statistics."""
    column = torch.full(KEEP.shape, 99.0, dtype=F64)  # nonsense at tokens that do not train
    column[KEEP] = 0.0
    column[torch.arange(5), LAST] = torch.tensor(scores, dtype=F64)
    column.requires_grad_()
    columns = {"loss_mask": keep, "unit": UNIT, "chosen": CHOSEN}
    if margins is not None:
        columns["margin"] = torch.tensor(margins, dtype=F64)
    losses, statistics = loss(column, TensorDict(columns, batch_size=[5]), **options)
    (gradient,) = torch.autograd.grad(losses.sum(), column)
    assert not any(number.requires_grad for number in statistics.values())
    return losses.detach(), gradient[torch.arange(5), LAST], statistics


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-14, atol=1e-14)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_bradley_terry_by_hand():
    losses, gradient, statistics = run(bradley_terry, margin=False)
    close(losses, [-math.log(sigmoid(gap)) for gap in GAPS] + [0.0])
    near, far = 2 * sigmoid(-1.0), 2 * sigmoid(3.0)  # twice: both rows carry the pair
    close(gradient, [-near, far, -far, near, 0.0])
    close(statistics["preference/accuracy"], [1.0, 0.0, 0.0, 1.0, 0.0])
    close(statistics["preference/margin"], [*GAPS, 0.0])
    close(statistics["preference/score_chosen"], [1.5, -1.0, -1.0, 1.5, 0.0])
    close(statistics["preference/score_rejected"], [0.5, 2.0, 2.0, 0.5, 0.0])


def test_a_margin_moves_the_gap_but_not_what_is_told_of_it():
    losses, gradient, statistics = run(bradley_terry, margins=[0.25, 2.0, 2.0, 0.25, 0.0], margin=True)
    near, far = 1.0 - 0.25, -3.0 - 2.0
    close(losses, [-math.log(sigmoid(gap)) for gap in (near, far, far, near)] + [0.0])
    close(gradient[:2], [-2 * sigmoid(-near), 2 * sigmoid(-far)])
    close(statistics["preference/margin"], [*GAPS, 0.0])


def test_at_equal_scores_the_loss_is_ln_2_and_the_gradient_a_half():
    losses, gradient, statistics = run(bradley_terry, scores=[0.3] * 5, margin=False)
    close(losses, [math.log(2)] * 4 + [0.0])
    close(gradient, [-1.0, 1.0, -1.0, 1.0, 0.0])  # two rows, a half each
    assert not statistics["preference/accuracy"].any(), "a tie is not a preference"


@pytest.mark.parametrize("way", [1, -1])
def test_scores_that_are_far_apart_leave_the_loss_finite(way):
    losses, gradient, _ = run(bradley_terry, scores=[way * 1e4, 0.0, 0.0, -way * 1e4, 0.0], margin=False)
    close(losses[[0, 3]], [0.0 if way > 0 else 2e4] * 2)
    close(gradient[[0, 3]], [0.0, 0.0] if way > 0 else [-2.0, 2.0])


def test_the_scores_of_a_preference_may_be_shifted():
    plain, shifted = (run(bradley_terry, scores=[s + shift for s in SCORES], margin=False) for shift in (0, 5.0))
    torch.testing.assert_close(plain[0], shifted[0], rtol=1e-12, atol=1e-12)


def test_centering_by_hand():
    losses, gradient, statistics = run(score_centering)
    close(losses, [4.0, 1.0, 1.0, 4.0, 0.0])
    close(gradient, [8.0, 4.0, 4.0, 8.0, 0.0])
    assert not statistics


@pytest.mark.parametrize(("loss", "options"), [(bradley_terry, {"margin": False}), (score_centering, {})])
def test_a_pair_of_which_one_row_does_not_train_is_none(loss, options):
    keep = KEEP.clone()
    keep[3] = False
    losses, gradient, _ = run(loss, keep=keep, **options)
    assert not losses[[0, 3]].any() and not gradient[[0, 3]].any() and losses[[1, 2]].all()
