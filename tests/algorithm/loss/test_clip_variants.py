"""Losses that select tokens of the whole mini-batch: by hand, and the same selection for every split and order."""

import math

import pytest
import torch

from rft.algorithm import LOSSES
from rft.algorithm.loss.clip import ppo_clip
from rft.algorithm.loss.clip_variants import covariances
from tests.helpers import batch_of

F64 = torch.float64
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
OPTIONS = {
    "clip_cov": CLIP | {"share": 0.1, "cov_low": 0.2, "cov_high": 5.0},
    "kl_cov": {"share": 0.1, "kappa": 2.0},
    "m2po": CLIP | {"tau": 0.04, "among": "all"},
}


def alone(tensor):
    return tensor


def evaluated(name, logprobs, batch, options, seed=0):
    """Loss, gradient and statistics of a mini-batch, prepared by itself."""
    plugin = LOSSES.build({"name": name, **options}, name)
    logprobs = torch.as_tensor(logprobs, dtype=F64).clone().requires_grad_()
    columns = plugin.call("prepare", logprobs.detach(), batch, all_sum=alone, seed=seed)
    batch = batch.clone().update(columns)
    loss, statistics = plugin(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.detach(), gradient, statistics


def close(found, expected):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def test_covariance_by_hand():
    batch = batch_of([[False, True, True], [False, True, False]], advantages=[[9, 2, -1], [9, 2, 9]])
    logprobs = torch.tensor([[7.0, -1.0, -3.0], [7.0, -2.0, 7.0]], dtype=F64)  # means 1 and -2
    found = covariances(logprobs, batch, alone)
    close(found[batch["loss_mask"]], [1, 2, 0])


def clip_case():
    """Six tokens of covariance -6, -3, 3, 6, 0, 0: the mean of A is 0, that of the log-probabilities -1."""
    logprobs = [[-3.0, -2.0, 0.0], [1.0, -1.0, -1.0]]
    return logprobs, batch_of([[True] * 3] * 2, old_logprobs=logprobs, advantages=[[3, 3, 3], [3, -6, -6]])


def test_clip_cov_by_hand():
    logprobs, batch = clip_case()
    options = CLIP | {"share": 0.2, "cov_low": 1.0, "cov_high": 5.0}  # 0.2 of 6: one token
    loss, gradient, statistics = evaluated("clip_cov", logprobs, batch, options)
    close(loss, [[-3, -3, 0], [-3, 6, 6]])
    close(gradient, [[-3, -3, 0], [-3, 6, 6]])
    close(statistics["clip/cov"], [[0, 0, 1], [0, 0, 0]])
    for bounds in ({"cov_high": 3.0}, {"cov_low": 3.0}):  # they are open
        loss, _, statistics = evaluated("clip_cov", logprobs, batch, options | bounds)
        close(loss, [[-3, -3, -3], [-3, 6, 6]])
        assert not statistics["clip/cov"].any()


@pytest.mark.parametrize(("old", "drawn"), [(-0.25, True), (-0.27, False), (1.0, True)])
def test_clip_cov_draws_from_tokens_that_keep_their_gradient(old, drawn):
    """exp(0.25) is inside the clip of 1.3 and exp(0.27) is not; a ratio far below one is not clipped where A > 0."""
    logprobs, batch = clip_case()
    batch["old_logprobs"][0, 2] = old
    options = CLIP | {"share": 1e-9, "cov_low": 1.0, "cov_high": 5.0}  # at least one
    _, _, statistics = evaluated("clip_cov", logprobs, batch, options)
    assert statistics["clip/cov"].sum() == statistics["clip/cov"][0, 2] == drawn


def test_clip_cov_draws_another_token_with_another_seed():
    logprobs, batch = clip_case()
    options = CLIP | {"share": 0.2, "cov_low": -9.0, "cov_high": 9.0}
    drawn = [evaluated("clip_cov", logprobs, batch, options, seed)[2]["clip/cov"].flatten() for seed in range(60)]
    assert all(tokens.sum() == 1 for tokens in drawn)
    assert (torch.stack(drawn).sum(0) > 0).all()


def test_kl_cov_by_hand():
    logprobs, batch = clip_case()
    batch["old_logprobs"][1, 0] = 0.5  # covariance 6, the largest; l = 0.5
    batch["old_logprobs"][0, 2] = 0.25  # l = -0.25
    for share, second in ((0.2, 0), (0.34, 1)):  # one token, then two
        loss, gradient, statistics = evaluated("kl_cov", logprobs, batch, {"share": share, "kappa": 2.0})
        first, other = 3 * math.exp(0.5), 3 * math.exp(-0.25)
        close(loss, [[-3, -3, -other + second * 0.5], [-first + 1, 6, 6]])
        close(gradient, [[-3, -3, -other - second * 2], [-first + 2, 6, 6]])
        close(statistics["cov/penalized"], [[0, 0, second], [1, 0, 0]])
        close(statistics["kl/old"], [[0, 0, math.exp(-0.25) - 0.75], [math.exp(0.5) - 1.5, 0, 0]])


def test_m2po_by_hand():
    """Squared log-ratios 0, 0.01, 0.04, 0.09, 1, 4 to the rollout policy; those outward are 0.01, 0.09, 4."""
    now = [[-1.0, -1.1, -0.8], [-1.3, -2.0, 1.0]]
    batch = batch_of(
        [[True] * 3] * 2, rollout_logprobs=[[-1.0] * 3] * 2, old_logprobs=now, advantages=[[1, -1, -1], [-1, 1, 1]]
    )
    for among, tau, masked in [
        ("all", 0.04, [[0, 0, 0], [0, 1, 1]]),  # mean of the first four 0.035
        ("all", 0.03, [[0, 0, 0], [1, 1, 1]]),
        ("all", 9.0, [[0, 0, 0], [0, 0, 0]]),
        ("all", 0.0, [[0, 1, 1], [1, 1, 1]]),
        ("outward", 0.05, [[0, 0, 0], [0, 0, 1]]),  # mean of two 0.05
        ("outward", 0.04, [[0, 0, 0], [1, 0, 1]]),
    ]:
        loss, gradient, statistics = evaluated("m2po", now, batch, CLIP | {"tau": tau, "among": among})
        plain = torch.where(torch.tensor(masked) == 1, 0.0, -batch["advantages"])
        close(loss, plain)
        close(gradient, plain)
        close(statistics["clip/m2"], masked)


def test_m2po_without_a_clip():
    batch = batch_of([[True, True]], rollout_logprobs=[[-1, -1]], old_logprobs=[[-1, -44]], advantages=[[1, 1]])
    options = {"clip_low": math.inf, "clip_high": math.inf, "tau": 999.0, "among": "outward"}
    loss, gradient, statistics = evaluated("m2po", [[-0.5, 0.0]], batch, options)
    close(loss, [[-math.exp(0.5), -math.exp(20)]])
    close(gradient, [[-math.exp(0.5), 0]])
    assert not statistics["clip/low"].any() and not statistics["clip/high"].any()


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_where_nothing_moved_and_nothing_is_drawn_the_gradient_is_that_of_reinforce(name):
    logprobs, batch = clip_case()
    batch["rollout_logprobs"] = batch["old_logprobs"]
    options = OPTIONS[name] | ({"cov_low": 99.0, "cov_high": 100.0} if name == "clip_cov" else {})
    _, gradient, _ = evaluated(name, logprobs, batch, options)
    close(gradient, -batch["advantages"])


def test_without_selected_tokens_the_loss_is_the_clipped_one():
    generator = torch.Generator().manual_seed(0)
    now, old, advantages = torch.randn(3, 4, 5, dtype=F64, generator=generator)
    keep = torch.rand(4, 5, generator=generator) < 0.7
    batch = batch_of(keep, old_logprobs=old, advantages=advantages, rollout_logprobs=old)
    expected, statistics = ppo_clip(now, batch, **CLIP, dual_clip=None)
    for name, options in (("clip_cov", {"share": 0.1, "cov_low": 1e6, "cov_high": 1e7}), ("m2po", {"tau": 1e6})):
        options = OPTIONS[name] | options
        loss, _, numbers = evaluated(name, now, batch, options)
        close(loss, expected)
        assert {key: value.tolist() for key, value in numbers.items() if key in statistics} == {
            key: value.tolist() for key, value in statistics.items()
        }


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("distance", [44.0, -44.0])
def test_extreme_ratios_stay_finite(name, distance):
    keep = torch.ones(2, 3, dtype=torch.bool)
    now = torch.full((2, 3), -50.0, dtype=F64) + torch.arange(3) / 8
    old = now - distance
    batch = batch_of(keep, old_logprobs=old, rollout_logprobs=old, advantages=[[1, -1, 2], [-2, 1, 1]])
    loss, gradient, statistics = evaluated(name, now, batch, OPTIONS[name])
    assert loss.isfinite().all() and gradient.isfinite().all()
    assert all(number.isfinite().all() for number in statistics.values())


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_nothing_trained_selects_nothing(name):
    columns = {column: torch.full((2, 3), torch.nan) for column in ("old_logprobs", "rollout_logprobs", "advantages")}
    batch = batch_of(torch.zeros(2, 3, dtype=torch.bool), **columns)
    loss, gradient, statistics = evaluated(name, torch.zeros(2, 3), batch, OPTIONS[name])
    assert not loss.any() and not gradient.any() and not any(number.any() for number in statistics.values())


SELECTIONS = {
    "clip_cov": OPTIONS["clip_cov"] | {"cov_low": -1.0},
    "kl_cov": OPTIONS["kl_cov"],
    "m2po": OPTIONS["m2po"] | {"tau": 0.3},
    "m2po outward": OPTIONS["m2po"] | {"tau": 0.3, "among": "outward"},
}


@pytest.mark.parametrize("name", sorted(SELECTIONS))
@pytest.mark.parametrize("tied", [False, True])
def test_a_selection_does_not_depend_on_ranks_order_or_padding(over_ranks, name, tied):
    plugin = LOSSES.build({"name": name.split()[0], **SELECTIONS[name]}, "loss")

    def selected(logprobs, batch, all_sum):
        (column,) = plugin.call("prepare", logprobs, batch, all_sum=all_sum, seed=11).values()
        return column

    generator = torch.Generator().manual_seed(1)
    now, old, rollout, advantages = torch.randn(4, 12, 9, dtype=F64, generator=generator)
    if tied:
        now, old, rollout, advantages = [(column * 2).round() / 2 for column in (now, old, rollout, advantages)]
    keep = torch.rand(12, 9, generator=generator) < 0.7
    keep[4] = False
    batch = batch_of(keep, old_logprobs=old, rollout_logprobs=rollout, advantages=advantages)
    whole = selected(now, batch, alone)
    assert whole.any() and not (whole & ~keep).any() and (keep & ~whole).any()

    def wide(column, value=math.nan):
        return torch.nn.functional.pad(column, (0, 4), value=value)

    columns = {key: wide(batch[key]) for key in ("old_logprobs", "rollout_logprobs", "advantages")}
    found = selected(wide(now), batch_of(wide(keep, False), **columns), alone)
    assert torch.equal(found, wide(whole, False))

    for seed, cuts in enumerate([(3,), (1, 5), (0, 4, 8)]):
        order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
        parts = order.tensor_split(cuts)
        found = over_ranks(lambda rows, all_sum: selected(now[rows], batch[rows], all_sum), parts)
        assert torch.equal(torch.cat(found), whole[order])
