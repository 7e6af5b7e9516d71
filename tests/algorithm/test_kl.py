"""KL estimators, the penalty of the reward, and control of the coefficient."""

import math

import pytest
import torch

from rft.algorithm.kl import AdaptiveKL, build_control, k3, kl_penalty

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


def test_a_number_is_a_fixed_coefficient():
    control = build_control(0.05, "terms.kl.coef")
    control.update(kl=100.0, rows=1000)
    control.load_state_dict(control.state_dict())
    assert control.coef == 0.05


ADAPTIVE = {"name": "adaptive", "initial": 0.5, "target": 2.0, "horizon": 100.0}


def test_adaptive_control_by_hand():
    control = build_control(ADAPTIVE, "terms.kl.coef")
    control.update(kl=2.2, rows=10)  # error 0.1
    assert control.coef == pytest.approx(0.5 * 1.01, rel=1e-12)
    control.update(kl=200.0, rows=10)  # error 99, clipped to 0.2
    assert control.coef == pytest.approx(0.5 * 1.01 * 1.02, rel=1e-12)
    control.update(kl=0.0, rows=50)  # error -1, clipped to -0.2
    assert control.coef == pytest.approx(0.5 * 1.01 * 1.02 * 0.9, rel=1e-12)


def test_adaptive_control_resumes():
    control = AdaptiveKL(initial=0.5, target=2.0, horizon=100.0)
    control.update(kl=200.0, rows=10)
    resumed = AdaptiveKL(initial=0.5, target=2.0, horizon=100.0)
    resumed.load_state_dict(control.state_dict())
    assert resumed.coef == control.coef != 0.5


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ("much", r"terms\.kl\.coef: expected number, got 'much'"),
        (True, r"terms\.kl\.coef: expected number, got True"),
        ({"name": "adaptve"}, r"terms\.kl\.coef\.name: .*did you mean adaptive"),
        (ADAPTIVE | {"target": 0.0}, r"terms\.kl\.coef\.target: .* above 0, got 0"),
        (ADAPTIVE | {"horizon": -1}, r"terms\.kl\.coef\.horizon: .* above 0, got -1"),
        ({"name": "adaptive", "initial": 0.5, "target": 2.0}, r"terms\.kl\.coef\.horizon is missing"),
    ],
)
def test_a_wrong_control_names_its_key(node, message):
    with pytest.raises(ValueError, match=message):
        build_control(node, "terms.kl.coef")
