"""KL estimators and the penalty of the reward."""

import math

import pytest
import torch

from rft.algorithm.kl import binary_kl, k1, k2, k3, kl_penalty, straight_through

F64 = torch.float64


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.5, -0.1]),
        ("k2", [0.125, 0.005]),
        ("k3", [math.exp(-0.5) - 0.5, math.exp(0.1) - 1.1]),
        ("abs", [0.5, 0.1]),
    ],
)
def test_penalty_by_hand(estimator, expected):
    now, reference = torch.tensor([[-0.5, -1.1]], dtype=F64), torch.tensor([[-1.0, -1.0]], dtype=F64)
    found = kl_penalty(now, reference, estimator=estimator)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=F64), rtol=1e-12, atol=1e-14)


def test_k3_is_finite_and_never_pushes_the_wrong_way():
    d = torch.tensor([-44.0, -1.0, 0.0, 1.0, 44.0], dtype=F64, requires_grad=True)
    found = k3(d)
    (slope,) = torch.autograd.grad(found.sum(), d)
    assert found.detach()[[0, 2, 4]].tolist() == [math.exp(20) - 21, 0.0, 43.0 + math.exp(-44)]
    assert slope[0] == 0 and slope[1] < 0 and slope[2] == 0 and slope[3] > 0 and slope[4] > 0


def test_penalty_of_bfloat16_is_float32():
    column = torch.zeros(1, 1, dtype=torch.bfloat16)
    assert kl_penalty(column, column, estimator="k1").dtype == torch.float32


@pytest.mark.parametrize("value", [k1, k3])
def test_straight_through_has_the_value_of_one_and_the_gradient_of_another(value):
    d = torch.tensor([-44.0, -0.3, 0.0, 2.0], dtype=F64, requires_grad=True)
    found = straight_through(value(d), k2(d))
    (slope,) = torch.autograd.grad(found.sum(), d)
    torch.testing.assert_close(found, value(d), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(slope, d.detach(), rtol=1e-12, atol=1e-12)


def test_k3_of_almost_nothing_is_no_rounding_in_float32():
    d = torch.tensor([1e-3, -1e-4, 1e-5, 0.0])
    torch.testing.assert_close(k3(d), 0.5 * d.square(), rtol=2e-2, atol=1e-13)
    assert (k3(torch.linspace(-1e-3, 1e-3, 1001)) >= 0).all()


def test_binary_kl():
    p, q = torch.tensor([0.5, 0.9, 0.3], dtype=F64).log(), torch.tensor([0.8, 0.2, 0.3], dtype=F64).log()
    by_hand = [
        0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2),
        0.9 * math.log(4.5) + 0.1 * math.log(0.1 / 0.8),
        0,
    ]
    torch.testing.assert_close(binary_kl(p, q), torch.tensor(by_hand, dtype=F64), rtol=1e-12, atol=1e-12)
    certain = torch.tensor([0.0, 0.0, -44.0, -1e-3])
    found = binary_kl(certain, certain.flip(0))
    assert found.dtype == torch.float32 and found.isfinite().all()
    assert not binary_kl(certain, certain).any()
