"""Losses that weigh a row by its ratio: numbers and gradients by hand, both signs, both clips, gaps, empty rows."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.loss.sequence import gmpo, gspo, gspo_token, gvpo, luspo, topr, vespo

F64 = torch.float64
KEEP = [False, True, False, True]  # log-ratios l1 and l3 at the trained tokens, nonsense elsewhere


def run(loss, log_ratios, advantages, other="old_logprobs", keep=None, group=None, **options):
    """Loss, gradient and statistics where the other policy is at -1 everywhere."""
    now = (torch.tensor(log_ratios, dtype=F64) - 1).requires_grad_()
    advantages = torch.tensor(advantages, dtype=F64).broadcast_to(now.shape)
    columns = {
        "loss_mask": torch.tensor(keep or [KEEP] * len(now)),
        "group": torch.tensor(group or [0] * len(now)),
        other: torch.full_like(now.detach(), -1.0),
        "advantages": advantages,
    }
    losses, statistics = loss(now, TensorDict(columns, batch_size=[len(now)]), **options)
    (gradient,) = torch.autograd.grad(losses.sum(), now)
    return losses.detach(), gradient, statistics


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def pair(number):
    return [[0, number, 0, number]]


S = math.exp(0.2)  # of log-ratios 0.1 and 0.3
CLIPS = [  # sign of A and of the log-ratios, bounds, value of the clipped ratio, slope, clipped low, clipped high
    (1, 1, 0.2, 0.3, S, S, 0, 0),
    (1, 1, 0.2, 0.1, 1.1, 0, 0, 1),
    (1, -1, 0.1, 0.3, 1 / S, 1 / S, 0, 0),
    (-1, 1, 0.2, 0.1, S, S, 0, 0),
    (-1, -1, 0.2, 0.3, 1 / S, 1 / S, 0, 0),
    (-1, -1, 0.1, 0.3, 0.9, 0, 1, 0),
]


@pytest.mark.parametrize("loss", [gspo, gspo_token])
@pytest.mark.parametrize(("sign", "way", "low", "high", "ratio", "slope", "at_low", "at_high"), CLIPS)
def test_gspo_by_hand(loss, sign, way, low, high, ratio, slope, at_low, at_high):
    rows = [[9.0, 0.1 * way, 5.0, 0.3 * way]]
    losses, gradient, statistics = run(loss, rows, 2.0 * sign, clip_low=low, clip_high=high)
    close(losses, pair(-2 * sign * ratio))
    close(gradient, pair(-2 * sign * slope))
    close(statistics["clip/low"], pair(at_low))
    close(statistics["clip/high"], pair(at_high))
    l1, l3 = 0.1 * way, 0.3 * way
    close(statistics["kl/old"], [[0, math.exp(l1) - 1 - l1, 0, math.exp(l3) - 1 - l3]])


def test_gspo_and_its_token_form_differ_where_the_advantages_of_a_row_do():
    rows, advantages = [[9.0, 0.1, 5.0, 0.3]], [[7.0, 2.0, 7.0, 0.0]]
    losses, gradient, _ = run(gspo, rows, advantages, clip_low=0.5, clip_high=0.5)
    close(losses, [[0, -2 * S, 0, 0]])
    close(gradient, pair(-S))  # one ratio: its gradient reaches both tokens
    token_losses, gradient, _ = run(gspo_token, rows, advantages, clip_low=0.5, clip_high=0.5)
    close(gradient, [[0, -2 * S, 0, 0]])
    assert torch.equal(losses, token_losses)


@pytest.mark.parametrize("loss", [gspo, gspo_token])
def test_gspo_at_the_bound_is_not_clipped(loss):
    for sign in (1.0, -1.0):
        _, gradient, statistics = run(loss, [[0.0] * 4], sign, clip_low=0.0, clip_high=0.0)
        close(gradient, pair(-sign))
        assert not statistics["clip/low"].any() and not statistics["clip/high"].any()


def test_luspo_is_gspo_times_the_trained_tokens():
    rows, keep = torch.randn(3, 4, dtype=F64).tolist(), [KEEP, [False] * 4, [False, True, True, True]]
    clips = {"clip_low": 0.1, "clip_high": 0.1, "keep": keep}
    for sign in (1.0, -1.0):
        losses, gradient, statistics = run(luspo, rows, sign, **clips)
        base, slope, numbers = run(gspo, rows, sign, **clips)
        lengths = torch.tensor([[2], [0], [3]])
        assert torch.equal(losses, base * lengths)
        torch.testing.assert_close(gradient, slope * lengths, rtol=1e-12, atol=0)
        assert all(torch.equal(statistics[name], numbers[name]) for name in numbers)


GMPO = [  # A, log-ratios, exponent, slopes over -A ratio / 2, clipped low, clipped high
    (2.0, (0.1, 0.6), 0.175, (1, 0), 0, 0.5),
    (2.0, (-0.6, 0.1), -0.25, (1, 1), 0, 0),
    (-2.0, (-0.6, 0.6), 0.05, (0, 1), 0.5, 0),
    (2.0, (0.25, 0.25), 0.25, (1, 1), 0, 0),  # on the bounds
    (-2.0, (-0.5, -0.5), -0.5, (1, 1), 0, 0),
    (0.0, (0.6, -0.6), 0, (0, 0), 0, 0),
    (2.0, (44.0, -44.0), -20, (0, 0), 0, 0.5),  # the mean, -21.9, is beyond the clamp
    (-2.0, (44.0, 44.0), 20, (0, 0), 0, 0),
]


@pytest.mark.parametrize(("advantage", "log_ratios", "exponent", "slopes", "at_low", "at_high"), GMPO)
def test_gmpo_by_hand(advantage, log_ratios, exponent, slopes, at_low, at_high):
    rows = [[9.0, log_ratios[0], 5.0, log_ratios[1]], [1.0] * 4]
    keep = [KEEP, [False] * 4]
    losses, gradient, statistics = run(gmpo, rows, advantage, keep=keep, clip_low=0.5, clip_high=0.25)
    ratio = math.exp(exponent)
    torch.testing.assert_close(losses, torch.tensor([-advantage * ratio, 0], dtype=F64), rtol=1e-12, atol=1e-12)
    slopes = [-advantage * ratio / 2 * slope for slope in slopes]
    close(gradient, [[0, slopes[0], 0, slopes[1]], [0] * 4])
    close(statistics["clip/low"], [at_low, 0])
    close(statistics["clip/high"], [at_high, 0])
    k3 = [math.exp(x) - 1 - x for x in (min(number, 20) for number in log_ratios)]
    close(statistics["kl/old"], [sum(k3) / 2, 0])


def test_gmpo_leaves_the_ratio_of_a_token_without_an_advantage_out():
    losses, gradient, _ = run(gmpo, [[9.0, 0.2, 5.0, -0.1]], [[7.0, 4.0, 7.0, 0.0]], clip_low=0.4, clip_high=0.4)
    ratio = math.exp(0.1)
    close(losses, [-2 * ratio])
    close(gradient, [[0, -ratio, 0, 0]])


TOPR = [  # advantages, log-ratios, weights, above 1
    ((2.0, 2.0), (0.1, 0.3), (1, 1), (0, 0)),
    ((2.0, 2.0), (-0.1, -0.3), (1, 1), (0, 0)),
    ((-2.0, -2.0), (0.1, 0.3), (1, 1), (1, 1)),
    ((-2.0, -2.0), (-0.1, -0.3), (math.exp(-0.4),) * 2, (0, 0)),
    ((-2.0, 2.0), (-0.1, -0.3), (math.exp(-0.4), 1), (0, 0)),
    ((-2.0, -2.0), (0.0, 0.0), (1, 1), (0, 0)),
    ((-2.0, -2.0), (-44.0, -44.0), (math.exp(-20),) * 2, (0, 0)),
    ((-2.0, -2.0), (44.0, 44.0), (1, 1), (1, 1)),
]


@pytest.mark.parametrize(("advantages", "log_ratios", "weights", "above"), TOPR)
def test_topr_by_hand(advantages, log_ratios, weights, above):
    rows = [[9.0, log_ratios[0], 5.0, log_ratios[1]]]
    losses, gradient, statistics = run(topr, rows, [[-5.0, advantages[0], -5.0, advantages[1]]], "rollout_logprobs")
    slopes = [-a * w for a, w in zip(advantages, weights, strict=True)]
    close(losses, [[0, slopes[0] * (log_ratios[0] - 1), 0, slopes[1] * (log_ratios[1] - 1)]])
    close(gradient, [[0, slopes[0], 0, slopes[1]]])
    close(statistics["clip/high"], [[0, above[0], 0, above[1]]])
    assert set(statistics) == {"clip/high", "kl/rollout"}


VESPO = [  # advantage, log-ratios, phi
    (2.0, (0.1, 0.3), math.exp(0.4) ** 2 * math.exp(3 * (1 - math.exp(0.4)))),
    (2.0, (-0.1, -0.3), math.exp(-0.4) ** 2 * math.exp(3 * (1 - math.exp(-0.4)))),
    (-2.0, (0.1, 0.3), math.exp(0.4) ** 3 * math.exp(2 * (1 - math.exp(0.4)))),
    (-2.0, (-0.1, -0.3), math.exp(-0.4) ** 3 * math.exp(2 * (1 - math.exp(-0.4)))),
    (2.0, (0.0, 0.0), 1),
    (2.0, (44.0, 44.0), 0),
    (-2.0, (-44.0, -44.0), math.exp(-60 + 2 * (1 - math.exp(-20)))),
]


@pytest.mark.parametrize(("advantage", "log_ratios", "weight"), VESPO)
def test_vespo_by_hand(advantage, log_ratios, weight):
    rows = [[9.0, log_ratios[0], 5.0, log_ratios[1]]]
    options = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
    losses, gradient, statistics = run(vespo, rows, advantage, **options)
    slope = -advantage * weight
    close(losses, [[0, slope * (log_ratios[0] - 1), 0, slope * (log_ratios[1] - 1)]])
    close(gradient, pair(slope))
    torch.testing.assert_close(gradient[0, 1].item(), slope, rtol=1e-12, atol=0)  # the smallest one, too
    assert set(statistics) == {"kl/old"}


def test_gvpo_by_hand():
    rows = [[9.0, 0.1, 5.0, 0.3], [9.0, 0.2, 5.0, -0.2], [1.0] * 4, [1.0] * 4]
    keep = [KEEP, KEEP, [False] * 4, KEEP]
    scores = [[1.0], [-1.0], [50.0], [7.0]]
    # gaps 0.5 * 0.4 - 1 = -0.8 and 0 + 1 = 1: mean 0.1; a row without tokens and a group of one have nothing to fit
    losses, gradient, statistics = run(gvpo, rows, scores, keep=keep, group=[5, 5, 5, 2], beta=0.5)
    close(losses, [0.405, 0.405, 0, 0])
    close(gradient, [[0, -0.45, 0, -0.45], [0, 0.45, 0, 0.45], [0] * 4, [0] * 4])
    k3 = {x: math.exp(x) - 1 - x for x in (0.1, 0.3, 0.2, -0.2, 1.0)}
    close(statistics["kl/old"], [(k3[0.1] + k3[0.3]) / 2, (k3[0.2] + k3[-0.2]) / 2, 0, k3[1.0]])


def test_gvpo_depends_on_no_shift_of_the_scores_and_is_zero_where_they_are_met():
    rows = [[9.0, 0.1, 5.0, 0.3], [9.0, 44.0, 5.0, -44.2]]
    losses, gradient, _ = run(gvpo, rows, [[1.0], [-1.0]], beta=0.1)
    shifted, moved, _ = run(gvpo, rows, [[4.0], [2.0]], beta=0.1)
    torch.testing.assert_close((shifted, moved), (losses, gradient), rtol=1e-12, atol=1e-12)
    losses, gradient, _ = run(gvpo, rows, [[0.04], [-0.02]], beta=0.1)
    close(losses, [0, 0])
    close(gradient, [[0] * 4] * 2)
