"""Losses that weigh the log-probability or the ratio of a token: numbers and gradients by hand, and identities."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import LOSSES
from rft.algorithm.loss.clip import ppo_clip
from rft.algorithm.loss.clip_variants import cpgd, two_sided
from rft.algorithm.loss.soft import cispo, dppo_kl, dppo_tv, dro, kimi, reinforce, sapo

F64 = torch.float64


def run(loss, now, old, advantages, dtype=F64, **options):
    """Loss, gradient and statistics of one row whose first token is not trained."""
    row = torch.tensor([[math.nan, *now]], dtype=dtype).requires_grad_()
    columns = {
        "loss_mask": torch.tensor([[False] + [True] * len(now)]),
        "old_logprobs": torch.tensor([[math.nan, *old]], dtype=dtype),
        "rollout_logprobs": torch.tensor([[math.nan, *old]], dtype=dtype),
        "advantages": torch.tensor([[math.nan, *advantages]], dtype=dtype),
    }
    losses, statistics = loss(row, TensorDict(columns, batch_size=[1]), **options)
    (gradient,) = torch.autograd.grad(losses.sum(), row)
    assert losses[0, 0] == gradient[0, 0] == 0 and all(number[0, 0] == 0 for number in statistics.values())
    return losses[0, 1:].detach(), gradient[0, 1:], {name: number[0, 1:] for name, number in statistics.items()}


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def logs(probabilities):
    return [math.log(p) for p in probabilities]


def times(*factors):
    return [math.prod(numbers) for numbers in zip(*factors, strict=True)]


def k3(ratios):
    return [r - 1 - math.log(r) for r in ratios]


def test_reinforce_by_hand():
    losses, gradient, statistics = run(reinforce, [-0.5, -2.0, -1.0], [0.0] * 3, [2.0, -1.0, 0.0])
    close(losses, [1.0, -2.0, 0.0])
    close(gradient, [-2.0, 1.0, 0.0])
    assert statistics == {}


@pytest.mark.parametrize("anchor", ["old", "rollout"])
@pytest.mark.parametrize(("clip_low", "smallest", "at_low"), [(None, 0.25, 0), (0.2, 0.8, 1), (0.75, 0.25, 0)])
def test_cispo_by_hand(anchor, clip_low, smallest, at_low):
    old, ratios = [-4.0] * 6, [3.0, 0.25, 3.0, 0.25, 1.5, 1.0]
    now = [-4.0 + math.log(r) for r in ratios]
    advantages = [2.0, 2.0, -2.0, -2.0, 1.0, 0.0]
    losses, gradient, statistics = run(cispo, now, old, advantages, clip_low=clip_low, clip_high=1.0, anchor=anchor)
    slopes = [-4.0, -2 * smallest, 4.0, 2 * smallest, -1.5, 0.0]  # the weight is at most 2
    close(losses, times(slopes, now))
    close(gradient, slopes)
    close(statistics["clip/high"], [1, 0, 1, 0, 0, 0])
    if clip_low != 0.75:  # on the bound, where rounding decides
        close(statistics["clip/low"], [0, at_low, 0, at_low, 0, 0])
    close(statistics[f"kl/{anchor}"], k3(ratios))


@pytest.mark.parametrize("name", ["cispo", "dppo_tv", "dppo_kl"])
def test_the_anchor_decides_what_is_read(name):
    options = {
        "cispo": {"clip_low": None, "clip_high": 4.0},
        "dppo_tv": {"clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 20.0},
        "dppo_kl": {"max_kl": 0.05, "ratio_cap": 20.0},
    }[name]
    for anchor in ("old", "rollout"):
        plugin = LOSSES.build({"name": name, "anchor": anchor, **options}, "loss")
        assert plugin.facts.reads == (f"{anchor}_logprobs", "advantages")


def test_sapo_by_hand():
    ratios, advantages = [2.0, 0.5, 2.0, 0.5, 1.0, 3.0], [3.0, 3.0, -3.0, -3.0, 1.0, 0.0]
    losses, gradient, statistics = run(sapo, logs(ratios), [0.0] * 6, advantages, tau_positive=1.0, tau_negative=2.0)
    gates = [1 / (1 + math.exp(-x)) for x in (1.0, -0.5, 2.0, -1.0, 0.0, 4.0)]  # tau (r - 1)
    scale = [4.0, 4.0, 2.0, 2.0, 4.0, 2.0]  # 4 / tau
    close(losses, [-a * g * s for a, g, s in zip(advantages, gates, scale, strict=True)])
    close(gradient, [-a * 4 * g * (1 - g) * r for a, g, r in zip(advantages, gates, ratios, strict=True)])
    close(statistics["kl/old"], k3(ratios))


def test_cpgd_by_hand():
    ratios = [1.1, 1.5, 0.5, 1.1, 1.5, 0.5, 1.5]
    advantages = [2.0, 2.0, 2.0, -2.0, -2.0, -2.0, 0.0]
    losses, gradient, statistics = run(cpgd, logs(ratios), [0.0] * 7, advantages, clip_low=0.2, clip_high=0.3)
    effective = logs([1.1, 1.3, 0.5, 1.1, 1.5, 0.8, 1.0])
    close(losses, [-a * e for a, e in zip(advantages, effective, strict=True)])
    close(gradient, [-2, 0, -2, 2, 2, 0, 0])
    close(statistics["clip/high"], [0, 1, 0, 0, 0, 0, 0])
    close(statistics["clip/low"], [0, 0, 0, 0, 0, 1, 0])
    close(statistics["kl/old"], k3(ratios))


def test_cpgd_clips_the_tokens_that_ppo_clips():
    generator = torch.Generator().manual_seed(0)
    now, advantages = torch.randn(2, 64, dtype=F64, generator=generator).tolist()
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    _, slope, statistics = run(cpgd, now, [0.0] * 64, advantages, **clips)
    _, gradient, numbers = run(ppo_clip, now, [0.0] * 64, advantages, **clips, dual_clip=None)
    assert all(torch.equal(statistics[name], numbers[name]) for name in numbers)
    torch.testing.assert_close(gradient, slope * torch.tensor(now, dtype=F64).exp(), rtol=1e-12, atol=0)


def test_two_sided_is_its_formula():
    ratios, signs = [5.0, 3.0, 1.1, 0.5] * 2, [2.0] * 4 + [-2.0] * 4
    losses, gradient, statistics = run(
        two_sided, logs(ratios), [0.0] * 8, signs, clip_low=0.2, clip_high=0.2, delta=4.0
    )
    close(losses, [max(-a * min(r, 4), -a * min(max(r, 0.8), 1.2)) for a, r in zip(signs, ratios, strict=True)])
    close(gradient, [0, 0, -2.2, -1.0, 0, 6.0, 2.2, 0])
    close(statistics["clip/high"], [1, 1, 0, 0, 1, 0, 0, 0])
    close(statistics["clip/low"], [0, 0, 0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize(("delta", "dual_clip"), [(1e9, None), (4.0, 4.0)])
def test_two_sided_is_ppo_clip(delta, dual_clip):
    now, advantages = torch.randn(2, 64, dtype=F64).mul(2).tolist()
    clips = {"clip_low": 0.2, "clip_high": 0.2}
    found = run(two_sided, now, [0.0] * 64, advantages, **clips, delta=delta)
    expected = run(ppo_clip, now, [0.0] * 64, advantages, **clips, dual_clip=dual_clip)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize(("loss", "strength"), [(dro, "beta"), (kimi, "tau")])
def test_the_quadratic_pull_by_hand(loss, strength):
    now, old, advantages = [-0.5, -1.1, -1.0], [-1.0, -1.0, -1.0], [2.0, -1.0, 0.0]  # log-ratios 0.5, -0.1 and 0
    losses, gradient, statistics = run(loss, now, old, advantages, **{strength: 0.2}, level="token")
    close(losses, [1.0 + 0.025, -1.1 + 0.001, 0])
    close(gradient, [-2.0 + 0.1, 1.0 - 0.02, 0])
    close(statistics["kl/old"], k3([math.exp(0.5), math.exp(-0.1), 1.0]))
    losses, gradient, _ = run(loss, now, old, advantages, **{strength: 0.2}, level="row")
    close(losses, [1.0 + 0.02, -1.1 - 0.004, 0])  # the shares sum to 0.2 / 2 * 0.4^2
    close(gradient, [-2.0 + 0.08, 1.0 + 0.08, 0.08])


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_dppo_tv_by_hand(anchor):
    old = [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.01, 0.01, 0.5]
    now = [0.8, 0.3, 0.8, 0.3, 0.6, 0.45, 0.25, 0.25, 0.9]
    advantages = [2.0, 2.0, -2.0, -2.0, 2.0, -2.0, 2.0, -2.0, 0.0]
    losses, gradient, statistics = run(
        dppo_tv, logs(now), logs(old), advantages, clip_low=0.1, clip_high=0.24001, ratio_cap=20.0, anchor=anchor
    )
    slopes = [0, -1.2, 3.2, 0, -2.4, 1.8, -40.0, 40.0, 0]  # the last two weigh 25, capped
    close(gradient, slopes)
    close(losses, times(slopes, logs(now)))
    close(statistics["clip/high"], [1, 0, 0, 0, 0, 0, 0, 0, 0])
    close(statistics["clip/low"], [0, 0, 0, 1, 0, 0, 0, 0, 0])
    close(statistics[f"kl/{anchor}"], k3([p / q for p, q in zip(now, old, strict=True)]))


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_dppo_kl_by_hand(anchor):
    old = [0.5] * 6 + [0.01]
    now = [0.8, 0.2, 0.8, 0.2, 0.55, 0.45, 0.25]  # KL 0.223 four times (0.193 the other way), 0.005 twice, 0.243
    advantages = [2.0, 2.0, -2.0, -2.0, 2.0, -2.0, -2.0]
    losses, gradient, statistics = run(
        dppo_kl, logs(now), logs(old), advantages, max_kl=0.2, ratio_cap=20.0, anchor=anchor
    )
    slopes = [0, -0.8, 3.2, 0, -2.2, 1.8, 40.0]
    close(gradient, slopes)
    close(losses, times(slopes, logs(now)))
    close(statistics["clip/high"], [1, 0, 0, 0, 0, 0, 0])
    close(statistics["clip/low"], [0, 0, 0, 1, 0, 0, 0])
    inside = run(dppo_kl, logs(now), logs(old), advantages, max_kl=0.2232, ratio_cap=20.0, anchor=anchor)
    assert not inside[2]["clip/high"].any() and not inside[2]["clip/low"].any()  # 0.22314 is the largest of these


@pytest.mark.parametrize(
    ("loss", "radius"), [(dppo_tv, {"clip_low": 0.0, "clip_high": 0.0}), (dppo_kl, {"max_kl": 0.0})]
)
def test_dppo_on_the_border_is_inside(loss, radius):
    _, gradient, _ = run(loss, [-1.0, -0.3], [-1.0, -0.3], [2.0, -2.0], **radius, ratio_cap=20.0, anchor="old")
    close(gradient, [-2.0, 2.0])


EXTREME = [  # loss, options, (value, slope) of the log-ratios 44 and -44 with A = 1, then with A = -1
    (reinforce, {}, (-44, -1), (44, -1), (44, 1), (-44, 1)),
    (
        cispo,
        {"clip_low": None, "clip_high": 4.0, "anchor": "old"},
        (-220, -5),
        (44 * math.exp(-20), -math.exp(-20)),
        (220, 5),
        (-44 * math.exp(-20), math.exp(-20)),
    ),
    (
        sapo,
        {"tau_positive": 1.0, "tau_negative": 1.0},
        (-4, 0),
        (-4 / (1 + math.exp(1 - math.exp(-20))), 0),
        (4, 0),
        (4 / (1 + math.exp(1 - math.exp(-20))), 0),
    ),
    (cpgd, {"clip_low": 0.2, "clip_high": 0.2}, (-math.log(1.2), 0), (44, -1), (44, 1), (math.log(0.8), 0)),
    (two_sided, {"clip_low": 0.2, "clip_high": 0.2, "delta": 4.0}, (-1.2, 0), (-math.exp(-20), 0), (4, 0), (0.8, 0)),
    (kimi, {"tau": 0.1, "level": "token"}, (52.8, 3.4), (140.8, -5.4), (140.8, 5.4), (52.8, -3.4)),
]


@pytest.mark.parametrize(("loss", "options", "up", "down", "bad_up", "bad_down"), EXTREME)
def test_log_ratios_of_44(loss, options, up, down, bad_up, bad_down):
    advantages = [1.0, 1.0, -1.0, -1.0]
    losses, gradient, statistics = run(loss, [44.0, -44.0] * 2, [0.0] * 4, advantages, **options)
    expected = (up, down, bad_up, bad_down)
    torch.testing.assert_close(losses, torch.tensor([value for value, _ in expected], dtype=F64), rtol=1e-9, atol=0)
    torch.testing.assert_close(gradient, torch.tensor([slope for _, slope in expected], dtype=F64), rtol=1e-9, atol=0)
    assert all(number.isfinite().all() for number in statistics.values())
