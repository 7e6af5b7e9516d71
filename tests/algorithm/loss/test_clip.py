"""Losses: numbers and gradients by hand, degenerate ratios."""

import math

import pytest
import torch

from rft.algorithm import LOSSES
from rft.algorithm.loss.clip import ppo_clip
from rft.algorithm.loss.supervised import nll, value
from rft.algorithm.loss.terms import drift, entropy, kl
from tests.helpers import batch_of

F64 = torch.float64


def value_and_gradient(loss, output, batch, **options):
    output = torch.as_tensor(output, dtype=F64).clone().requires_grad_()
    losses, statistics = loss(output, batch, **options)
    (gradient,) = torch.autograd.grad(losses.sum(), output)
    return losses.detach(), gradient, statistics


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


RATIOS = [1.0, 1.5, 0.5, 1.5, 0.5, 1.1, 1.5]
ADVANTAGES = [9.0, 1.0, 1.0, -1.0, -1.0, -2.0, 0.0]
KEEP = [False, True, True, True, True, True, True]


@pytest.mark.parametrize(
    ("dual_clip", "third", "slope", "high"), [(None, 1.5, 1.5, 0.0), (1.4, 1.4, 0.0, 1.0), (1.6, 1.5, 1.5, 0.0)]
)
def test_ppo_clip_by_hand(dual_clip, third, slope, high):
    old = [-1.0] * 7
    now = [-1.0 + math.log(r) for r in RATIOS]
    batch = batch_of([KEEP], old_logprobs=[old], advantages=[ADVANTAGES])
    losses, gradient, statistics = value_and_gradient(
        ppo_clip, [now], batch, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip
    )
    close(losses, [[0, -1.3, -0.5, third, 0.8, 2.2, 0]])
    close(gradient, [[0, 0, -0.5, slope, 0, 2.2, 0]])
    close(statistics["clip/high"], [[0, 1, 0, high, 0, 0, 0]])
    close(statistics["clip/low"], [[0, 0, 0, 0, 1, 0, 0]])
    close(statistics["kl/old"], [[r - 1 - math.log(r) for r in RATIOS]])  # 0 outside keep: its ratio is 1


@pytest.mark.parametrize("log_ratio", [44.0, -44.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_float_stays_finite(log_ratio, advantage):
    options = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    batch = batch_of([[True]], old_logprobs=[[0.0]], advantages=[[advantage]])
    losses, gradient, _ = value_and_gradient(ppo_clip, [[log_ratio]], batch, **options)
    clamped = math.exp(math.copysign(20, log_ratio))
    close(losses, [[max(-advantage * clamped, -advantage * min(max(clamped, 0.8), 1.2))]])
    assert gradient.isfinite().all()


def test_bfloat16_is_computed_in_float32():
    batch = batch_of([[True]], old_logprobs=[[-1.0]], advantages=[[1.0]]).apply(lambda x: x.to(torch.bfloat16))
    batch["loss_mask"] = torch.tensor([[True]])
    losses, _ = ppo_clip(
        torch.tensor([[-1.0]], dtype=torch.bfloat16), batch, clip_low=0.2, clip_high=0.2, dual_clip=None
    )
    assert losses.dtype == torch.float32


def test_nll_by_hand():
    losses, gradient, _ = value_and_gradient(nll, [[-3.0, -1.0, -2.0]], batch_of([[False, True, True]]))
    close(losses, [[0, 1, 2]])
    close(gradient, [[0, -1, -1]])


def test_entropy_by_hand():
    losses, gradient, _ = value_and_gradient(entropy, [[3.0, 1.0, 2.0]], batch_of([[False, True, True]]))
    close(losses, [[0, -1, -2]])
    close(gradient, [[0, -1, -1]])


def test_value_by_hand():
    batch = batch_of([[False, True, True, True]], values=[[0, 1, 1, 1]], returns=[[9, 2, 2, 1.4]])
    now = [[5.0, 1.5, 1.1, 1.5]]
    losses, gradient, statistics = value_and_gradient(value, now, batch, clip=0.2)
    # (1.5, 1.2) to 2: 0.64 > 0.25; (1.1, 1.1) to 2: equal; (1.5, 1.2) to 1.4: 0.04 > 0.01
    close(losses, [[0, 0.32, 0.405, 0.02]])
    close(gradient, [[0, 0, -0.9, 0]])
    close(statistics["clip/value"], [[0, 1, 0, 1]])
    losses, gradient, statistics = value_and_gradient(value, now, batch, clip=None)
    close(losses, [[0, 0.125, 0.405, 0.005]])
    close(gradient, [[0, -0.5, -0.9, 0.1]])
    assert statistics == {}


def test_kl_term_by_hand():
    batch = batch_of([[True, False, True]], ref_logprobs=[[-1.0, -1.0, -1.0]])
    now = [[-0.5, 7.0, -1.1]]  # d = 0.5 and -0.1
    k3 = [[math.exp(-0.5) - 0.5, 0, math.exp(0.1) - 1.1]]
    losses, gradient, statistics = value_and_gradient(kl, now, batch, estimator="k3")
    close(losses, k3)
    close(gradient, [[1 - math.exp(-0.5), 0, 1 - math.exp(0.1)]])
    close(statistics["kl/ref"], k3)
    losses, gradient, statistics = value_and_gradient(kl, now, batch, estimator="k2")
    close(losses, [[0.125, 0, 0.005]])
    close(gradient, [[0.5, 0, -0.1]])
    close(statistics["kl/ref"], k3)
    losses, gradient, _ = value_and_gradient(kl, now, batch, estimator="k2_row")
    close(losses, [[0.1, 0, -0.02]])  # sums to 0.4^2 / 2
    close(gradient, [[0.4, 0, 0.4]])


def test_kl_times_the_ratio_by_hand():
    now = [[-0.5, 7.0, -1.1, -45.0]]  # d: 0.5, -0.1, and -44 beyond the clamp; log-ratios to the old policy 0.3, 0.3, 0
    columns = {"ref_logprobs": [[-1.0] * 4], "old_logprobs": [[-0.8, 0.0, -1.4, -45.0]]}
    batch = batch_of([[True, False, True, True]], **columns)
    losses, gradient, statistics = value_and_gradient(kl, now, batch, estimator="k3_ratio")
    r, k3 = math.exp(0.3), [math.exp(-0.5) - 0.5, 0, math.exp(0.1) - 1.1, math.exp(20) - 21]
    close(losses, [[r * k3[0], 0, r * k3[2], k3[3]]])
    close(gradient, [[r * 0.5, 0, r * -0.1, -44]])
    close(statistics["kl/ref"], [k3])
    assert "old_logprobs" in LOSSES.build({"name": "kl", "estimator": "k3_ratio"}, "terms.kl").facts.reads
    assert "old_logprobs" not in LOSSES.build({"name": "kl", "estimator": "k3"}, "terms.kl").facts.reads


@pytest.mark.parametrize(
    ("estimator", "exact"), [("k3_ratio", True), ("k2", False), ("k2_row", False), ("k3", False), ("k3+", False)]
)
def test_gradient_of_the_kl_term_on_tokens_of_the_old_policy(estimator, exact):
    """One token of four symbols, weighted with its probability under the old policy."""
    generator = torch.Generator().manual_seed(5)
    logits, old, reference = torch.randn(3, 4, dtype=F64, generator=generator)
    now = logits.requires_grad_().log_softmax(-1)[:, None]
    old, reference = old.log_softmax(-1)[:, None], reference.log_softmax(-1)[:, None]
    (truth,) = torch.autograd.grad((now.exp() * (now - reference)).sum(), logits, retain_graph=True)
    losses, _ = kl(now, batch_of([[True]] * 4, ref_logprobs=reference, old_logprobs=old), estimator=estimator)
    (found,) = torch.autograd.grad((old.exp() * losses).sum(), logits)
    error = (found - truth).abs().max().item()
    assert (error < 1e-12) is exact
    assert exact or error > 1e-3


def test_drift_term_by_hand():
    batch = batch_of([[True, False, True, True, True]], old_logprobs=[[-1.0] * 5])
    now = [[-0.5, 7.0, -1.1, -45.0, 43.0]]  # log-ratios 0.5, -0.1 and +-44
    losses, gradient, statistics = value_and_gradient(drift, now, batch)
    expected = [[math.exp(0.5) - 1.5, 0, math.exp(-0.1) - 0.9, math.exp(-44) + 43, math.exp(20) - 21]]
    close(losses, expected)
    close(gradient, [[math.exp(0.5) - 1, 0, math.exp(-0.1) - 1, math.exp(-44) - 1, 0]])
    close(statistics["kl/old"], expected)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k4"])
def test_kl_term_refuses_other_estimators(estimator):
    with pytest.raises(ValueError, match=r"terms\.kl\.estimator: expected one of k2, k2_row, k3"):
        LOSSES.build({"name": "kl", "estimator": estimator}, "terms.kl")


@pytest.mark.parametrize(("estimator", "exact"), [("k2_row", True), ("k2", False), ("k3", False)])
def test_gradient_of_the_kl_term_over_all_sequences(estimator, exact):
    """Three symbols, two positions, every sequence weighted with its probability: no sampling noise."""
    generator = torch.Generator().manual_seed(3)
    logits = [torch.randn(*shape, dtype=F64, generator=generator) for shape in ((3,), (3, 3), (3,), (3, 3))]
    theta = [logit.requires_grad_() for logit in logits[:2]]

    def sequences(first, second):
        first, second = first.log_softmax(-1), second.log_softmax(-1)
        return torch.stack([first[:, None].expand(3, 3), second], dim=-1).reshape(9, 2)

    now, reference = sequences(*theta), sequences(*logits[2:])
    probability = now.sum(dim=1).exp()
    truth = torch.autograd.grad((probability * (now - reference).sum(dim=1)).sum(), theta, retain_graph=True)
    batch = batch_of([[True, True]] * 9, ref_logprobs=reference)
    losses, _ = kl(now, batch, estimator=estimator)
    found = torch.autograd.grad((probability.detach()[:, None] * losses).sum(), theta)
    error = max((f - t).abs().max().item() for f, t in zip(found, truth, strict=True))
    assert (error < 1e-12) is exact
    assert exact or error > 1e-3
