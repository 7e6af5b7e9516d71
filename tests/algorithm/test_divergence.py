"""KL estimators and the penalty of the reward; the diagnostics of a mismatch by hand, and as the divergences that they
estimate.
"""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.divergence import (
    binary_kl,
    k1,
    k2,
    k3,
    kl_penalty,
    log_policy_mismatch,
    straight_through,
    token_record,
    worst_tokens,
)
from rft.metrics import Metrics
from tests.helpers import batch_of

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


e = math.exp


def batch(rollout, keep):
    """Rows whose token ids count on from row to row."""
    ids = torch.arange(keep.numel()).reshape(keep.shape)
    tokens = TensorDict({"input_ids": ids}, batch_size=[len(keep)])
    group = torch.arange(len(keep)) // 2
    return batch_of(
        keep, group, unit=torch.arange(len(keep)), tokens=tokens, response_mask=keep, rollout_logprobs=rollout
    )


def numbers(old, rollout, keep, splits=None, ages=None):
    ranks, whole = [], batch(rollout, keep)
    if ages is not None:
        whole["ages"] = ages
    for rows in splits or [list(range(len(keep)))]:
        ranks.append(Metrics())
        log_policy_mismatch(ranks[-1], old[rows], whole[rows])
    handed = []
    for metrics in ranks:
        metrics.reduce(lambda mine: handed.append(mine) or [mine])
    return ranks[0].reduce(lambda _: handed)


LOG_RHO = torch.tensor([[9.0, 0.5, -1.0], [9.0, 0.25, 9.0], [9.0, 9.0, 9.0]], dtype=F64)
KEEP = torch.tensor([[0, 1, 1], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
ROLLOUT = torch.full((3, 3), -2.0, dtype=F64)
OLD = torch.where(KEEP, ROLLOUT + LOG_RHO, float("nan"))
BY_HAND = {
    "rollout/logprob_gap": (0.5 + 1.0 + 0.25) / 3,
    "rollout/logprob_gap_max": 1.0,
    "rollout/kl": (e(0.5) - 1.5 + e(-1) + e(0.25) - 1.25) / 3,
    "rollout/kl_k1": (-0.5 + 1.0 - 0.25) / 3,
    "rollout/kl_reverse": (0.5 * e(0.5) - e(0.5) + 1 - e(-1) - e(-1) + 1 + 0.25 * e(0.25) - e(0.25) + 1) / 3,
    "rollout/ppl_gap": (0.25 - 0.25) / 2,  # -mean log rho of the two rows that have tokens
    "rollout/chi2": (e(1) + e(-2) + e(0.5)) / 3 - 1,
    "rollout/ess": (e(0.5) + e(-1) + e(0.25)) ** 2 / (3 * (e(1) + e(-2) + e(0.5))),
}


@pytest.mark.parametrize("splits", [None, [[0], [1], [2]], [[2, 1], [], [0]]])
def test_by_hand_however_the_rows_are_spread(splits):
    assert numbers(OLD, ROLLOUT, KEEP, splits) == pytest.approx(BY_HAND, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("splits", [None, [[0], [1], [2]], [[2, 1], [], [0]]])
def test_by_hand_by_the_age_of_the_weights(splits):
    """Two tokens have the weights of this step, and one those of the step before; none is two versions old."""
    age = torch.tensor([[2, 0, 1], [2, 0, 2], [2, 2, 2]])
    ages = torch.nn.functional.one_hot(age, 3).bool()
    by_age = {
        "rollout/ess_age_0": (e(0.5) + e(0.25)) ** 2 / (2 * (e(1) + e(0.5))),
        "rollout/ess_age_1": 1.0,
    }
    assert numbers(OLD, ROLLOUT, KEEP, splits, ages) == pytest.approx(BY_HAND | by_age, rel=1e-12, abs=1e-14)


def test_no_mismatch():
    found = numbers(ROLLOUT, ROLLOUT, KEEP)
    assert found.pop("rollout/ess") == 1.0
    assert set(found.values()) == {0.0}


def test_nothing_trained_says_nothing_but_the_largest():
    assert numbers(OLD, ROLLOUT, torch.zeros_like(KEEP)) == {"rollout/logprob_gap_max": 0.0}


@pytest.mark.parametrize("gap", [44.0, -44.0])
def test_extreme_log_ratios_stay_finite(gap):
    found = numbers(ROLLOUT + gap, ROLLOUT, KEEP)
    assert all(map(math.isfinite, found.values()))
    assert found["rollout/logprob_gap_max"] == 44.0
    assert min(found["rollout/kl"], found["rollout/kl_reverse"]) >= 0


def test_each_is_the_divergence_it_is_named_for():
    """Ten thousand tokens of one position, each symbol as often as the rollout policy samples it."""
    rollout, old = torch.tensor([0.5, 0.3, 0.2], dtype=F64), torch.tensor([0.4, 0.4, 0.2], dtype=F64)
    tokens = torch.repeat_interleave(torch.arange(3), (rollout * 10_000).round().long())[:, None]
    found = numbers(old.log()[tokens], rollout.log()[tokens], torch.ones_like(tokens, dtype=torch.bool))
    forward, backward = (rollout * (rollout / old).log()).sum(), (old * (old / rollout).log()).sum()
    chi2 = float(((old - rollout) ** 2 / rollout).sum())
    assert found["rollout/kl"] == pytest.approx(float(forward), rel=1e-9)
    assert found["rollout/kl_k1"] == pytest.approx(float(forward), rel=1e-9)
    assert found["rollout/kl_reverse"] == pytest.approx(float(backward), rel=1e-9)
    assert found["rollout/chi2"] == pytest.approx(chi2, rel=1e-9)
    assert found["rollout/ess"] == pytest.approx(1 / (1 + chi2), rel=1e-9)


def records(logprobs, rows):
    read = map(token_record, worst_tokens(logprobs, rows).tolist())
    return [note[1] for note in read if note is not None]


def test_the_worst_tokens_are_told_one_by_one():
    found = records(OLD, batch(ROLLOUT, KEEP))
    assert [(token["unit"], token["token"], token["position"]) for token in found] == [(0, 2, 1), (0, 1, 0), (1, 4, 0)]
    assert found[0] == {
        "group": 0, "unit": 0, "position": 1, "token": 2, "trainer": -3.0, "engine": -2.0, "before": [0, 1]
    }  # fmt: skip
    many = torch.ones(4, 9, dtype=torch.bool)
    gaps = torch.arange(36.0).reshape(4, 9)
    worst = records(gaps, batch(torch.zeros(4, 9), many))
    assert [token["token"] for token in worst] == [35, 34, 33, 32, 31]
    assert worst[0]["before"] == list(range(27, 35))
    assert records(OLD, batch(ROLLOUT, torch.zeros_like(KEEP))) == []


def test_of_all_ranks_the_worst_tokens_are_told():
    ranks = [Metrics(), Metrics()]
    for metrics, rows in zip(ranks, ([1, 2], [0]), strict=True):
        log_policy_mismatch(metrics, OLD[rows], batch(ROLLOUT, KEEP)[rows])
    handed = []
    for metrics in ranks:
        metrics.largest_notes(2, lambda mine: handed.append(mine) or [mine])
    assert [token["token"] for token in ranks[1].largest_notes(2, lambda _: handed)] == [2, 1]
