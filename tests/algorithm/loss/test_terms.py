"""Terms beside the loss: straight-through KL, what steers them, and the likelihood of correct rows."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import LOSSES
from rft.algorithm.loss.terms import echo, kl, observation_scale, positive_nll, positive_scale
from rft.algorithm.token_weights.aggregation import token_mean, unit_weights

F64 = torch.float64
KEEP = torch.tensor([[True, False, True], [True, True, False], [False, False, True], [False, False, False]])
LOGPROBS = torch.tensor([[-1.0, 7.0, -2.0], [-3.0, -4.0, 7.0], [7.0, 7.0, -5.0], [7.0, 7.0, 7.0]], dtype=F64)


def alone(tensor):
    return tensor


def gradient_of(losses, output):
    return torch.autograd.grad(losses.sum(), output)[0]


@pytest.mark.parametrize(
    ("estimator", "values"), [("k1+", [0.5, -0.1]), ("k3+", [math.exp(-0.5) - 0.5, math.exp(0.1) - 1.1])]
)
def test_straight_through_kl_by_hand(estimator, values):
    keep = torch.tensor([[True, False, True]])
    batch = TensorDict({"loss_mask": keep, "ref_logprobs": torch.full((1, 3), -1.0, dtype=F64)}, batch_size=[1])
    now = torch.tensor([[-0.5, 7.0, -1.1]], dtype=F64, requires_grad=True)
    losses, statistics = kl(now, batch, estimator=estimator)
    expected = torch.tensor([[values[0], 0, values[1]]], dtype=F64)
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-12, atol=1e-12)
    slope = torch.tensor([[0.5, 0, -0.1]], dtype=F64)
    torch.testing.assert_close(gradient_of(losses, now), slope, rtol=1e-12, atol=1e-12)
    assert statistics["kl/ref"][0, 0].item() == pytest.approx(math.exp(-0.5) - 0.5, rel=1e-12)


@pytest.mark.parametrize(
    ("node", "controlled_by", "relation", "target"),
    [
        ({"name": "entropy"}, "entropy", "exact", "entropy per position"),
        ({"name": "router_balance"}, None, "exact", "router balance"),
        ({"name": "kl", "estimator": "k2_row"}, "kl/ref", "exact", "kl"),
        ({"name": "kl", "estimator": "k2"}, "kl/ref", "near", "kl"),
        ({"name": "kl", "estimator": "k3"}, "kl/ref", "near", "kl"),
        ({"name": "kl", "estimator": "k3_ratio"}, "kl/ref", "near", "kl"),
        ({"name": "kl", "estimator": "k1+"}, "kl/ref", "near", "kl"),
    ],
)
def test_a_term_says_what_steers_it_and_what_its_gradient_is(node, controlled_by, relation, target):
    facts = LOSSES.build(node, "term").facts
    assert facts.controlled_by == controlled_by
    assert (facts.gradient.relation, facts.gradient.target) == (relation, target)


def prepared(correct, all_sum=alone, rows=slice(None)):
    terms = TensorDict({"accuracy": torch.tensor(correct), "other": torch.ones(4)}, batch_size=[4])
    batch = TensorDict({"loss_mask": KEEP, "terms": terms}, batch_size=[4])[rows]
    return batch.update(positive_scale(LOGPROBS[rows], batch, all_sum=all_sum, term="accuracy"))


def test_positive_nll_by_hand():
    """5 trained tokens, 3 of them in correct rows."""
    batch = prepared([1.0, 0.0, 0.5, 1.0])
    now = LOGPROBS.clone().requires_grad_()
    losses, statistics = positive_nll(now, batch, term="accuracy")
    third = 5 / 3
    expected = torch.tensor([[third, 0, 2 * third], [0, 0, 0], [0, 0, 5 * third], [0, 0, 0]], dtype=F64)
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-12, atol=1e-12)
    slope = torch.tensor([[-third, 0, -third], [0, 0, 0], [0, 0, -third], [0, 0, 0]], dtype=F64)
    torch.testing.assert_close(gradient_of(losses, now), slope, rtol=1e-12, atol=1e-12)
    assert statistics == {}
    mean = (losses.detach() * token_mean(KEEP, torch.arange(4), all_sum=alone)).sum()
    assert mean.item() == pytest.approx((1 + 2 + 5) / 3, rel=1e-6)  # weights are float32


@pytest.mark.parametrize("correct", [[0.0] * 4, [0.0, -1.0, 0.0, 1.0]])
def test_positive_nll_without_a_correct_token_is_zero(correct):
    losses, _ = positive_nll(LOGPROBS, prepared(correct), term="accuracy")
    assert not losses.any()


def test_positive_nll_divides_by_the_tokens_of_all_ranks():
    """The first two rows alone, told what a second rank adds: 1 trained token, and it is correct."""
    found = prepared([1.0, 0.0, 0.5, 1.0], lambda tensor: tensor + torch.tensor([1, 1]), slice(0, 2))
    assert torch.equal(found["positive_scale"], prepared([1.0, 0.0, 0.5, 1.0])["positive_scale"][:2])


def test_positive_scale_is_float32_of_low_precision():
    terms = TensorDict({"accuracy": torch.ones(4)}, batch_size=[4])
    batch = TensorDict({"loss_mask": KEEP, "terms": terms}, batch_size=[4])
    found = positive_scale(LOGPROBS.bfloat16(), batch, all_sum=alone, term="accuracy")
    assert found["positive_scale"].dtype == torch.float32


def test_echo_is_the_mean_over_observed_tokens():
    """Three observed tokens in the rows that train, of which there are three; those of the last row do not count."""
    observed = torch.tensor([[False, True, False], [False, False, True], [True, False, False], [True, True, True]])
    batch = TensorDict({"loss_mask": KEEP, "observation_mask": observed}, batch_size=[4])
    batch["observation_scale"] = observation_scale(LOGPROBS, batch, all_sum=alone)["observation_scale"]
    assert batch["observation_scale"].tolist() == [1, 1, 1, 0]
    logprobs = (LOGPROBS - 8).requires_grad_()
    losses, statistics = echo(logprobs, batch)
    assert losses.tolist() == [1, 1, 1, 0] and statistics == {}
    total = losses * unit_weights(KEEP.any(1), all_sum=alone)
    assert total.sum().item() == pytest.approx(1.0)
    expected = torch.where(observed & KEEP.any(1, keepdim=True), -1 / 3, 0.0).double()
    torch.testing.assert_close(gradient_of(total, logprobs), expected, rtol=0, atol=1e-7)
