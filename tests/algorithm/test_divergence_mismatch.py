"""The diagnostics by hand, and as the divergences that they estimate."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.mismatch import log_policy_mismatch, token_record, worst_tokens
from rft.metrics import Metrics
from tests.helpers import batch_of

F64 = torch.float64
e = math.exp


def batch(rollout, keep):
    """Rows whose token ids count on from row to row."""
    ids = torch.arange(keep.numel()).reshape(keep.shape)
    tokens = TensorDict({"input_ids": ids}, batch_size=[len(keep)])
    group = torch.arange(len(keep)) // 2
    return batch_of(
        keep, group, unit=torch.arange(len(keep)), tokens=tokens, response_mask=keep, rollout_logprobs=rollout
    )


def numbers(old, rollout, keep, splits=None):
    ranks = []
    for rows in splits or [list(range(len(keep)))]:
        ranks.append(Metrics())
        log_policy_mismatch(ranks[-1], old[rows], batch(rollout, keep)[rows])
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
