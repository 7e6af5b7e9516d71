"""Where current, old and rollout policy are one, every policy loss has the gradient of -A lp, times a known factor."""

import itertools
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

import rft
from rft.algorithm import LOSSES
from tests.helpers import batch_of

F64 = torch.float64
KEEP = torch.tensor([[0, 1, 1, 1, 0, 1], [0, 1, 0, 0, 1, 0], [0] * 6, [0, 0, 1, 0, 0, 0]], dtype=torch.bool)
GROUP = torch.tensor([3, 3, 3, 3])
ADVANTAGES = torch.tensor([1.5, -2.0, 0.7, 0.5], dtype=F64)  # of a row; those of a group sum to 0
LENGTHS = KEEP.sum(dim=1, keepdim=True).to(F64)
FACTORS = {
    **dict.fromkeys(["reinforce", "ppo_clip", "two_sided", "cpgd", "gspo", "gspo_token", "cispo", "sapo", "dro"], 1.0),
    **dict.fromkeys(["kimi", "dppo_tv", "dppo_kl", "topr", "vespo"], 1.0),
    "luspo": LENGTHS,
    "gmpo": 1 / LENGTHS.clamp(min=1),
    "gvpo": 0.1,  # beta
}
OF_ROWS = ("gspo", "luspo", "gmpo", "gvpo")  # take one advantage per row


def plugin(name):
    folder = rft.__path__[0] + "/config/algorithm/loss"
    return LOSSES.build(OmegaConf.to_container(OmegaConf.load(f"{folder}/{name}.yaml")), "loss")


def on_policy(logprobs, advantages, dtype=F64):
    columns = {"old_logprobs": logprobs, "rollout_logprobs": logprobs, "advantages": advantages}
    return batch_of(KEEP, GROUP, **{name: column.detach().to(dtype) for name, column in columns.items()})


def noise(seed):
    return torch.randn(KEEP.shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", sorted(FACTORS))
def test_gradient_is_that_of_reinforce(name):
    advantages = ADVANTAGES[:, None].expand(KEEP.shape) if name in OF_ROWS else noise(1)
    logprobs = (-noise(0).abs()).requires_grad_()
    loss, statistics = plugin(name)(logprobs, on_policy(logprobs, advantages))
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    expected = torch.where(KEEP, -advantages * FACTORS[name], 0.0)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert all(not number.any() for number in statistics.values())


@pytest.mark.parametrize("name", sorted(FACTORS))
def test_bfloat16_is_computed_in_float32(name):
    logprobs = (-noise(0).abs()).to(torch.bfloat16)
    loss, statistics = plugin(name)(logprobs, on_policy(logprobs, noise(1), torch.bfloat16))
    assert {number.dtype for number in (loss, *statistics.values())} == {torch.float32}


@pytest.mark.parametrize("name", sorted(FACTORS))
@pytest.mark.parametrize("log_ratio", [44.0, -44.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_in_float32_extreme_log_ratios_stay_finite(name, log_ratio, sign):
    logprobs = torch.full(KEEP.shape, min(log_ratio, 0.0)).requires_grad_()
    batch = on_policy(logprobs - log_ratio, torch.full(KEEP.shape, sign), torch.float32)
    loss, statistics = plugin(name)(logprobs, batch)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert all(number.isfinite().all() for number in (loss, gradient, *statistics.values()))


OTHER = {  # another value of every option, and one of those that need not act in the yaml to begin with
    **{"clip_low": 0.05, "clip_high": 0.07, "clip": 0.05, "dual_clip": 1.5, "delta": 1.9, "max_kl": 1e-4, "beta": 0.7},
    **{"share": 0.9, "kappa": 3.0, "cov_low": 0.0, "cov_high": 0.4, "tau": 0.3, "level": "row", "ratio_cap": 0.5},
    **{"tau_positive": 2.0, "tau_negative": 3.0, "among": "outward"},
    **{f"{name}_{side}": 0.3 for name in ("k", "lambda") for side in ("positive", "negative")},
}
START = {"clip_cov": {"share": 0.4, "cov_low": -9.0, "cov_high": 9.0}, "kl_cov": {"share": 0.4}, "m2po": {"tau": 0.05}}
READ_OLD = ("clip_cov", "cpgd", "dro", "gmpo", "gspo", "gspo_token", "gvpo", "kimi", "kl_cov", "luspo", "m2po",
            "ppo_dual_clip", "sapo", "two_sided", "vespo")  # fmt: skip
ANCHORED = ("cispo", "dppo_kl", "dppo_tv")


def gradient(options):
    """Of a loss whose old columns are the current ones; the engine's log-probabilities are others."""
    loss = LOSSES.build(options, "loss")
    generator = torch.Generator().manual_seed(0)
    current, advantages, far, returns = torch.randn(4, 8, 12, dtype=F64, generator=generator)
    current = (-current.abs()).requires_grad_()
    old = {"old_logprobs": current.detach(), "values": current.detach()}
    columns = {"rollout_logprobs": current.detach() + 0.3 * far, "advantages": advantages, "returns": returns}
    batch = batch_of(torch.ones(8, 12), **old, **columns)
    if loss.facts.prepare is not None:
        batch.update(loss.call("prepare", current.detach(), batch, all_sum=lambda total: total, seed=0))
    return torch.autograd.grad(loss(current, batch)[0].sum(), current)[0], loss.facts.idle_on_policy


@pytest.mark.parametrize(
    ("name", "anchor"),
    [*((name, None) for name in (*READ_OLD, "value")), *itertools.product(ANCHORED, ("old", "rollout"))],
)
def test_an_option_is_idle_on_policy_exactly_if_the_loss_says_so(name, anchor):
    folder = "critic_loss" if name == "value" else "loss"
    node = OmegaConf.to_container(OmegaConf.load(f"{rft.__path__[0]}/config/algorithm/{folder}/{name}.yaml"))
    node |= START.get(name, {}) | ({"anchor": anchor} if anchor else {})
    before, idle = gradient(node)
    options = node.keys() - {"name", "anchor"}
    changed = {option: gradient(node | {option: OTHER[option]})[0] for option in options}
    same = {option for option in options if torch.allclose(changed[option], before, rtol=1e-12, atol=0.0)}
    assert same == set(idle)


def test_every_loss_that_reads_old_logprobs_is_tested_for_idle_options():
    folder = Path(rft.__path__[0], "config", "algorithm", "loss")
    built = {path.stem: plugin(path.stem) for path in folder.glob("*.yaml")}
    reading = {loss.name for loss in built.values() if "old_logprobs" in loss.facts.reads}
    assert reading <= {built[name].name for name in (*READ_OLD, *ANCHORED)}


def test_drift_has_no_gradient_on_policy_whatever_its_coefficient():
    found, idle = gradient({"name": "drift"})
    assert not found.any() and idle == ("coef",)
