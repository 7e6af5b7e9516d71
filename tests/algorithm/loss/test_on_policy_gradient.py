"""Where current, old and rollout policy are one, every policy loss has the gradient of -A lp, times a known factor."""

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
