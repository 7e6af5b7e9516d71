"""What no other test noticed in the mutation check (scripts/mutate.py): sides of clips, borders, small counts."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import AGGREGATIONS, LOSSES
from rft.algorithm.advantage.baselines import rloo
from rft.algorithm.advantage.objectives import best_over_second
from rft.algorithm.advantage.returns import prime
from rft.algorithm.options import CorrectionOptions, Rule
from rft.algorithm.order_statistics import crossing, exact_mean, share_of, up_to_mean
from rft.algorithm.scores.groups import group_statistics
from rft.algorithm.statistics import moments
from rft.algorithm.token_weights.correction import Correction
from rft.metrics import Metrics
from tests.helpers import batch_of

F64 = torch.float64
CLIP = {"clip_low": 0.2, "clip_high": 0.4}


def alone(tensor):
    return tensor


def evaluated(name, log_ratios, advantages, other="old", keep=None, **options):
    """Loss and statistics where the log-probability is -1 wherever the other policy's is -1 - log ratio."""
    log_ratios, advantages = torch.tensor(log_ratios, dtype=F64), torch.tensor(advantages, dtype=F64)
    keep = torch.ones(log_ratios.shape, dtype=torch.bool) if keep is None else torch.tensor(keep)
    now = torch.full(log_ratios.shape, -1.0, dtype=F64)
    columns = {
        "loss_mask": keep,
        "advantages": advantages,
        "unit": torch.arange(len(keep)),
        "group": torch.zeros(len(keep)),
    }
    columns |= {f"{policy}_logprobs": now - log_ratios for policy in {other, "old"}}
    batch = TensorDict(columns, batch_size=[len(keep)])
    plugin = LOSSES.build({"name": name, **options}, "loss")
    if plugin.facts.prepare is not None:
        batch.update(plugin.call("prepare", now, batch, all_sum=alone, seed=0))
    return plugin(now, batch)


def close(found, expected):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("loss", "times"), [("two_sided", 1), ("luspo", 2)])
def test_each_bound_of_a_loss_that_hands_them_on(loss, times):
    ratios = torch.tensor([[1.5, 1.5], [1.3, 1.3], [0.7, 0.7], [0.9, 0.9]], dtype=F64)
    options = CLIP | ({"delta": 4.0} if loss == "two_sided" else {})
    losses, _ = evaluated(loss, ratios.log().tolist(), [[1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]], **options)
    close(losses, [[-1.4 * times] * 2, [-1.3 * times] * 2, [0.8 * times] * 2, [0.9 * times] * 2])


def test_clip_cov_draws_no_token_that_the_lower_bound_clips():
    # A < 0 and r = 0.7: clipped at 0.8, though not at 0.6
    free = {"share": 1.0, "cov_low": -99.0, "cov_high": 99.0}
    _, statistics = evaluated("clip_cov", [[math.log(0.7), 0.0, 0.3]], [[-1.0, -1.0, 1.0]], **CLIP, **free)
    close(statistics["clip/cov"], [[0, 1, 1]])


def test_m2po_counts_a_log_ratio_as_20_at_most():
    far = [[44.0] + [0.0] * 39]
    masked = {
        tau: evaluated("m2po", far, [[1.0] * 40], "rollout", tau=tau, among="all", **CLIP)[1]["clip/m2"].sum().item()
        for tau in (10.0, 9.9)
    }
    assert masked == {10.0: 0, 9.9: 1}  # 20^2 / 40 = 10


def test_m2po_moves_a_token_without_an_advantage_nowhere():
    _, statistics = evaluated("m2po", [[1.0, 1.0]], [[0.0, 1.0]], "rollout", tau=0.01, among="outward", **CLIP)
    close(statistics["clip/m2"], [[0, 1]])


def test_gmpo_counts_what_the_upper_bound_clips():
    _, statistics = evaluated("gmpo", [[0.3, 0.5], [-0.3, -0.1]], [[1.0, 1.0], [-1.0, -1.0]], **CLIP)
    close(statistics["clip/high"], [0.5, 0])
    close(statistics["clip/low"], [0, 0.5])


def test_small_advantages_have_their_sign():
    """Between -1 and 1, where a threshold other than 0 would show."""
    half = [[0.5, 0.5]]
    losses, _ = evaluated("topr", [[-0.3, -0.2]], half, "rollout")
    close(losses, half)
    weights = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
    losses, _ = evaluated("vespo", [[-0.3, -0.2]], half, **weights)
    close(losses, [[0.5 * math.exp(2 * -0.5 + 3 * (1 - math.exp(-0.5)))] * 2])
    trust = {"clip_low": 0.1, "clip_high": 0.1, "ratio_cap": 20.0, "anchor": "old"}
    losses, _ = evaluated("dppo_tv", [[1.0, -1.0]], half, **trust)  # p is 0.37; it was 0.14 and 1.0
    close(losses, [[0, 0.5 * math.exp(-1)]])
    losses, _ = evaluated("dppo_tv", [[1.0, -1.0]], [[-0.5, -0.5]], **trust)
    close(losses, [[-0.5 * math.e, 0]])


@pytest.mark.parametrize(("loss", "policy"), [("topr", "rollout"), ("vespo", "old")])
def test_the_divergence_is_that_of_the_policy_that_sampled(loss, policy):
    weights = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
    _, statistics = evaluated(loss, [[0.5, -1.0]], [[1.0, 1.0]], policy, **(weights if loss == "vespo" else {}))
    close(statistics[f"kl/{policy}"], [[math.exp(0.5) - 1.5, math.exp(-1.0)]])


def test_a_value_that_moved_down_too_far_is_clipped_and_one_within_the_clip_never():
    def clipped(values, old, returns):
        columns = {"loss_mask": torch.ones(values.shape, dtype=torch.bool), "values": old, "returns": returns}
        plugin = LOSSES.build({"name": "value", "clip": 0.2}, "critic_loss")
        return plugin(values, TensorDict(columns, batch_size=[len(values)]))[1]["clip/value"]

    close(clipped(*torch.tensor([[[0.5]], [[1.0]], [[0.0]]], dtype=F64)), [[1]])  # 0.8^2 is more than 0.5^2
    values, returns = torch.rand(2, 40, 50, generator=torch.Generator().manual_seed(0)) / 10
    old = values + 0.19  # old + (values - old) is not quite values
    assert ((old + (values - old) - returns).square() > (values - returns).square()).any()
    assert not clipped(values, old, returns).any()


def test_a_single_trained_token_is_its_own_mean():
    values, mask = torch.tensor([[3.0, 9.0]]), torch.tensor([[True, False]])
    assert exact_mean(values, mask, alone) == 3


def test_one_correct_token_gets_the_weight_of_all():
    columns = {
        "loss_mask": torch.tensor([[True, False], [True, True]]),
        "terms": TensorDict({"right": torch.tensor([1.0, 0.0])}, batch_size=[2]),
    }
    plugin = LOSSES.build({"name": "positive_nll", "term": "right"}, "terms.positive_nll")
    batch = TensorDict(columns, batch_size=[2])
    assert plugin.call("prepare", torch.zeros(2, 2), batch, all_sum=alone)["positive_scale"].tolist() == [3, 0]


def test_a_mean_that_is_too_large_by_the_smallest_step_is_too_large():
    values, mask = torch.tensor([[0.5 + 2**-30]], dtype=F64), torch.tensor([[True]])
    assert not up_to_mean(values, mask, 0.5, alone).any()
    assert up_to_mean(values, mask, 0.5 + 2**-30, alone).all()


def test_a_share_is_rounded_down_to_tokens_by_more_than_a_millionth():
    mask = torch.ones(1, 10, dtype=torch.bool)
    assert [share_of((3 - short) / 10, mask, alone).item() for short in (0.5e-6, 1.5e-6)] == [3, 2]


def test_crossing_sums_over_the_ranks_once_a_byte():
    calls = []
    crossing(torch.tensor([3, 5]), torch.tensor([1, 1]), 0, lambda numbers: calls.append(numbers.shape) or numbers)
    assert calls == [(256,)] * 8


def test_groups_of_two():
    keep, scores = torch.ones(2, 1, dtype=torch.bool), torch.tensor([1.0, 0.0], dtype=F64)
    rewards, group = torch.zeros(2, 1, dtype=F64), torch.zeros(2, dtype=torch.int64)
    close(rloo(scores, rewards, batch_of(keep, group))["advantages"], [[1], [-1]])
    process = torch.tensor([[0.5], [0.25]], dtype=F64)
    batch = batch_of(keep, group, prm_logprobs=process - 1, ref_logprobs=torch.full_like(process, -1.0))
    found = prime(scores, rewards, batch, beta=2.0, gamma=1.0)["advantages"]
    close(found, [[1 + 1 - 0.5], [-1 + 0.5 - 1]])  # the other's score, and the other's process reward


def test_two_large_scores_that_rounding_tells_apart_are_both_the_best():
    scores = torch.tensor([3e6, 3e6 + 0.25, 0.0])
    assert not best_over_second(scores, torch.zeros(3, dtype=torch.int64)).any()


@pytest.mark.parametrize("sign", [1, -1])
def test_what_counts_as_rounding_is_a_share_of_the_larger_score(sign):
    eps = torch.finfo(torch.float32).eps
    group = torch.zeros(2, dtype=torch.int64)
    for excess, tied in ((8 * eps, True), (24 * eps, False)):  # 4 eps of the larger one are 4 eps (1 + 4 eps)
        scores = sign * torch.tensor([1.0, 1 + eps * (4 + excess)], dtype=F64)
        assert group_statistics(scores, group).tied.all() == tied


def test_moments_of_nothing_are_zero():
    assert moments(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool), alone) == (0, 0)


def test_a_group_of_one_token_is_a_group():
    keep = torch.tensor([[True, False], [True, True]])
    compute_loss_weights = AGGREGATIONS.build({"name": "group_mean"}, "aggregation")
    close(compute_loss_weights(keep, torch.tensor([0, 1]), all_sum=alone), [[0.5, 0], [0.25, 0.25]])


def test_a_row_without_trained_tokens_is_outside_of_no_bound():
    rule = Rule("k1", "sequence", "sum", "drop", 0.5, None, "any")  # what sums to 0 would be outside
    keep, rollout = torch.tensor([[True], [False]]), torch.zeros(2, 1, dtype=F64)
    batch = batch_of(keep, torch.zeros(2, dtype=torch.int64), rollout_logprobs=rollout)
    correction = Correction(CorrectionOptions("old", False, {"rule": rule}), "algorithm.correction")
    correction.unsigned(rollout - 1, batch, alone, Metrics())
    assert batch["loss_mask"].equal(keep)
