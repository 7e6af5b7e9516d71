"""Every metric, level, aggregate and action of the algebra by hand, and what must not matter."""

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.options import CorrectionOptions, Rule
from rft.algorithm.token_weights.aggregation import row_weights
from rft.algorithm.token_weights.correction import Correction, measure
from rft.metrics import Metrics
from tests.helpers import batch_of

F64 = torch.float64
# log rho of three rows, two groups; the first token of each is the prompt's, the gap in row 1 is a tool's.
LOG_RHO = torch.tensor([[9.0, 0.5, -1.0, 0.0], [9.0, 2.0, 9.0, -3.0], [9.0, 0.25, 9.0, 9.0]], dtype=F64)
KEEP = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 0]], dtype=torch.bool)
GROUP = torch.tensor([7, 7, 3])
ROLLOUT = torch.full((3, 4), -3.5, dtype=F64)
NAN = float("nan")
e = math.exp
RULE = Rule("ratio", "token", None, "clamp", None, 2.0, "any")


def k3(x):
    return e(x) - 1 - x


def p(x):
    return abs(e(-3.5 + x) - e(-3.5))


def bernoulli(x):
    """KL of (q, 1 - q), q of the rollout policy, to (p, 1 - p)."""
    q, p = e(-3.5), e(-3.5 + x)
    return q * -x + (1 - q) * math.log((1 - q) / (1 - p))


def with_ratio(log_rho=LOG_RHO, keep=KEEP, group=GROUP, **columns):
    batch = batch_of(keep, group, rollout_logprobs=ROLLOUT[: len(keep)], **columns)
    return batch, batch["rollout_logprobs"] + torch.where(keep, log_rho, NAN)


def alone(tensor):
    return tensor


def applied(*rules, normalize=False, all_sum=alone, given=None, **columns):
    """The batch after both halves of a correction, and the numbers."""
    batch, logprobs = with_ratio(**columns) if given is None else given
    named = {f"rule{i}": rule for i, rule in enumerate(rules)}
    correction, metrics = Correction(CorrectionOptions("old", normalize, named), "algorithm.correction"), Metrics()
    correction.unsigned(logprobs, batch, all_sum, metrics)
    correction.signed(logprobs, batch, metrics)
    return batch, metrics.reduce(lambda mine: [mine])


def same(found, expected):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=1e-12, atol=1e-14)


TOKENS = {
    "ratio": [[e(0.5), e(-1), 1.0], [e(2), e(-3)], [e(0.25)]],
    "k1": [[-0.5, 1.0, 0.0], [-2.0, 3.0], [-0.25]],
    "k2": [[0.125, 0.5, 0.0], [2.0, 4.5], [0.03125]],
    "k3": [[k3(0.5), k3(-1), 0.0], [k3(2), k3(-3)], [k3(0.25)]],
    "abs_difference": [[p(0.5), p(-1), 0.0], [p(2), p(-3)], [p(0.25)]],
    "binary_kl": [[bernoulli(0.5), bernoulli(-1), 0.0], [bernoulli(2), bernoulli(-3)], [bernoulli(0.25)]],
}
AGGREGATES = {
    "product": math.prod,
    "geometric": lambda values: math.prod(values) ** (1 / len(values)),
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
}


@pytest.mark.parametrize("metric", TOKENS)
def test_metric_of_a_token_by_hand(metric):
    _, logprobs = with_ratio()
    found = measure(replace(RULE, metric=metric), logprobs, ROLLOUT, KEEP, GROUP)
    same(found[KEEP], [value for row in TOKENS[metric] for value in row])


@pytest.mark.parametrize(
    ("metric", "aggregate"),
    [
        (metric, aggregate)
        for metric in TOKENS
        for aggregate in (*(("product", "geometric") if metric == "ratio" else ("sum", "mean")), "max", "min")
    ],
)
def test_metric_of_a_row_and_of_a_group_by_hand(metric, aggregate):
    rows, of, (_, logprobs) = TOKENS[metric], AGGREGATES[aggregate], with_ratio()
    rule = replace(RULE, metric=metric, level="sequence", aggregate=aggregate)
    same(measure(rule, logprobs, ROLLOUT, KEEP, GROUP), [[of(row)] for row in rows])
    both = of(rows[0] + rows[1])
    rule = replace(rule, level="group")
    same(measure(rule, logprobs, ROLLOUT, KEEP, GROUP), [[both], [both], [of(rows[2])]])


def test_the_weight_of_a_row_is_the_geometric_mean_of_its_tokens():
    weights = torch.tensor([[0.0, 2.0, 4.0, 1.0], [0.0, 3.0, 0.0, 0.0], [0.0] * 4, [0.0, 3.0, 3.0, 0.0]], dtype=F64)
    keep = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 1], [0] * 4, [0, 0, 1, 0]], dtype=torch.bool)
    same(row_weights(batch_of(keep, correction_weights=weights)), [2.0, 0.0, 1.0, 3.0])


def test_clamp_moves_the_ratio_into_the_bounds():
    batch, numbers = applied(replace(RULE, low=0.5, high=1.5))
    same(batch["correction_weights"], [[0, 1.5, 0.5, 1.0], [0, 1.5, 0, 0.5], [0, e(0.25), 0, 0]])
    assert batch["loss_mask"].equal(KEEP)
    assert not batch["rejected"].any()
    assert numbers["correction/weight"] == pytest.approx((5.0 + e(0.25)) / 6, rel=1e-12)
    assert numbers["correction/weight_max"] == 1.5
    assert numbers["correction/outside_rule0"] == pytest.approx(4 / 6)
    assert numbers["correction/tokens_rejected"] == numbers["correction/rows_rejected"] == 0.0


def test_clamp_without_bounds_is_plain_importance_sampling():
    batch, _ = applied(replace(RULE, high=None))
    same(batch["correction_weights"], torch.where(KEEP, LOG_RHO.exp(), 0.0))


def test_a_row_has_one_weight():
    batch, _ = applied(replace(RULE, level="sequence", aggregate="product", high=None))
    same(batch["correction_weights"], torch.where(KEEP, torch.tensor([[e(-0.5)], [e(-1)], [e(0.25)]], dtype=F64), 0.0))


def test_zero_weighs_the_ratio_inside_the_bounds_and_keeps_the_denominators():
    batch, _ = applied(replace(RULE, action="zero", low=0.3, high=1.5))
    same(batch["correction_weights"], [[0, 0, e(-1), 1.0], [0, 0, 0, 0], [0, e(0.25), 0, 0]])
    assert batch["loss_mask"].equal(KEEP)
    assert not batch["rejected"].any()


def test_zero_of_a_divergence_weighs_one_inside_the_bounds():
    batch, _ = applied(replace(RULE, metric="k2", action="zero", high=0.2))
    same(batch["correction_weights"], [[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])


def test_mask_takes_tokens_out():
    batch, numbers = applied(replace(RULE, action="mask", low=0.3, high=1.6))
    assert batch["loss_mask"].int().tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert batch["rejected"].tolist() == [False, True, False]
    same(batch["correction_weights"], batch["loss_mask"].double())
    assert numbers["correction/tokens_rejected"] == pytest.approx(3 / 6)
    assert numbers["correction/rows_rejected"] == pytest.approx(1 / 3)
    assert "correction/weight" not in numbers


def test_mask_takes_rows_out():
    batch, _ = applied(replace(RULE, level="sequence", aggregate="min", action="mask", low=0.1, high=None))
    assert batch["rejected"].tolist() == [False, True, False]
    assert batch["loss_mask"].equal(KEEP & torch.tensor([[True], [False], [True]]))


def test_drop_takes_the_group_of_a_row_out():
    batch, numbers = applied(replace(RULE, level="sequence", aggregate="max", action="drop", high=2.0))
    assert batch["rejected"].tolist() == [True, True, False]
    assert numbers["correction/rows_rejected"] == pytest.approx(2 / 3)
    assert numbers["correction/outside_rule0"] == pytest.approx(2 / 6)


def test_a_group_is_judged_by_the_tokens_of_all_its_rows():
    """Its mean k1 is 0.3 where those of its rows are 1/6 and 1/2."""
    rule = replace(RULE, metric="k1", level="group", aggregate="mean", action="mask", high=0.299)
    assert applied(rule)[0]["rejected"].tolist() == [True, True, False]
    assert not applied(replace(rule, high=0.301))[0]["rejected"].any()


@pytest.mark.parametrize(("rho", "inside"), [(4.0, True), (0.25, False), (0.5, True), (5.0, True), (5.01, False)])
@pytest.mark.parametrize("action", ["mask", "zero"])
def test_bounds_are_bounds_on_rho_and_belong_to_the_inside(rho, inside, action):
    log_rho, keep = torch.full((1, 2), rho, dtype=F64).log(), torch.tensor([[False, True]])
    given = TensorDict(
        {"loss_mask": keep, "group": torch.tensor([0]), "rollout_logprobs": torch.zeros(1, 2, dtype=F64)}, [1]
    )
    if rho in (0.5, 5.0):  # exp(log(x)) is x but for the last bit
        rho, log_rho = 1.0, torch.zeros_like(log_rho)
        rule = replace(RULE, action=action, low=1.0, high=1.0)
    else:
        rule = replace(RULE, action=action, low=0.5, high=5.0)
    batch, _ = applied(rule, given=(given, log_rho))
    assert bool(batch["correction_weights"][0, 1] > 0) == inside
    assert bool(batch["rejected"]) == (action == "mask" and not inside)


def test_signed_rules_act_on_tokens_of_that_sign():
    rule = replace(RULE, metric="k1", level="sequence", aggregate="mean", action="mask", high=0.1, sign="negative")
    advantages = torch.tensor([[0, -1.0, 2.0, 0.0], [0, 1.0, 0, 1.0], [0, -1.0, 0, 0]], dtype=F64)
    batch, numbers = applied(rule, advantages=advantages)
    assert batch["loss_mask"].int().tolist() == [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 0, 0]]  # row 2: mean k1 is -0.25
    assert not batch["rejected"].any()
    assert numbers["correction/tokens_rejected"] == pytest.approx(1 / 6)
    assert numbers["correction/outside_rule0"] == pytest.approx(1 / 6)
    batch, _ = applied(replace(rule, sign="positive"), advantages=advantages)
    assert batch["loss_mask"].int().tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]
    batch, _ = applied(replace(rule, action="zero"), advantages=advantages)
    assert batch["loss_mask"].equal(KEEP)
    same(batch["correction_weights"], [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 0, 0]])


def test_signed_rules_leave_the_weights_of_others_alone():
    signed = replace(RULE, metric="k1", level="sequence", aggregate="mean", action="mask", high=0.1, sign="negative")
    batch, _ = applied(replace(RULE, high=1.5), signed, advantages=torch.full((3, 4), -1.0, dtype=F64))
    same(batch["correction_weights"], [[0, 0, 0, 0], [0, 0, 0, 0], [0, e(0.25), 0, 0]])


COMBINED = (
    replace(RULE, high=1.5),
    replace(RULE, metric="k3", level="sequence", aggregate="mean", action="mask", high=2.1),
    replace(RULE, level="sequence", aggregate="min", action="drop", low=0.3, high=None),
)


def test_the_order_of_rules_does_not_matter():
    forward, backward = applied(*COMBINED)[0], applied(*COMBINED[::-1])[0]
    assert all(forward[name].equal(backward[name]) for name in ("loss_mask", "rejected", "correction_weights"))
    assert forward["rejected"].tolist() == [True, True, False]
    pair = (replace(RULE, high=1.2), replace(RULE, metric="k2", action="zero", high=0.2))
    for rules in (pair, pair[::-1]):
        same(applied(*rules)[0]["correction_weights"], [[0, 1.2, 0, 1], [0, 0, 0, 0], [0, 1.2, 0, 0]])


def test_weights_normalised_over_the_tokens_that_remain():
    batch, numbers = applied(replace(RULE, high=1.5), replace(RULE, action="mask", low=0.1, high=None), normalize=True)
    weights = batch["correction_weights"]
    total = 1.5 + e(-1) + 1.0 + 1.5 + e(0.25)
    assert numbers["correction/weight"] == pytest.approx(total / 5, rel=1e-12)
    same(
        weights,
        [[0, *(5 / total * w for w in (1.5, e(-1), 1.0))], [0, 7.5 / total, 0, 0], [0, 5 * e(0.25) / total, 0, 0]],
    )
    assert float(weights.sum() / batch["loss_mask"].sum()) == pytest.approx(1.0, rel=1e-12)


def test_normalised_weights_do_not_depend_on_ranks(over_ranks):
    """Groups stay whole; a third rank has no rows at all."""
    rules = (COMBINED[0], replace(COMBINED[1], high=2.5))
    expected, _ = applied(*rules, normalize=True)
    parts = [torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([], dtype=torch.int64)]
    batch, logprobs = with_ratio()
    results = over_ranks(
        lambda rows, all_sum: applied(*rules, normalize=True, all_sum=all_sum, given=(batch[rows], logprobs[rows])),
        parts,
    )
    for name in ("loss_mask", "rejected", "correction_weights"):
        found = torch.cat([batch[name] for batch, _ in results])
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=0)
    assert results[2][1] == {}


@pytest.mark.parametrize("rule", COMBINED)
def test_row_order_and_padding_do_not_matter(rule):
    rows = torch.tensor([2, 0, 1])
    batch, logprobs = with_ratio()
    wide = TensorDict({n: torch.nn.functional.pad(c, (0, 2)) if c.dim() > 1 else c for n, c in batch.items()}, [3])
    expected, _ = applied(rule)
    moved, _ = applied(rule, given=(wide[rows], torch.nn.functional.pad(logprobs, (0, 2))[rows]))
    for name in ("loss_mask", "correction_weights"):
        torch.testing.assert_close(moved[name][:, :4], expected[name][rows])
        assert not moved[name][:, 4:].any()
    assert moved["rejected"].equal(expected["rejected"][rows])


def test_everything_rejected():
    mask = replace(RULE, level="sequence", aggregate="max", action="mask", high=0.01)
    batch, numbers = applied(mask, RULE, normalize=True)
    assert not batch["loss_mask"].any()
    assert not batch["correction_weights"].any()
    assert batch["rejected"].all()
    assert numbers["correction/rows_rejected"] == numbers["correction/tokens_rejected"] == 1.0
    batch, _ = applied(
        replace(RULE, action="zero", high=1e-3), normalize=True
    )  # all weights 0 have no mean to divide by
    assert not batch["correction_weights"].any()
    assert batch["loss_mask"].equal(KEEP)


@pytest.mark.parametrize("rule", [*COMBINED, replace(COMBINED[2], level="group")])
def test_rows_without_trained_tokens_and_batches_without_rows(rule):
    """Such a row is not rejected, and drops no group."""
    batch, numbers = applied(rule, keep=torch.zeros_like(KEEP))
    assert not batch["rejected"].any()
    assert not batch["correction_weights"].any()
    keep = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)
    batch, numbers = applied(rule, keep=keep, log_rho=torch.zeros_like(LOG_RHO))
    assert batch["loss_mask"].equal(keep)
    assert numbers["correction/rows_rejected"] == 0.0
    whole, logprobs = with_ratio()
    batch, numbers = applied(rule, given=(whole[:0], logprobs[:0]))
    assert batch["loss_mask"].shape == batch["correction_weights"].shape == (0, 4)
    assert batch["rejected"].shape == (0,)
    assert numbers == {}


@pytest.mark.parametrize("gap", [44.0, -44.0])
def test_extreme_log_ratios_stay_finite(gap):
    log_rho = torch.where(KEEP, gap, 0.0).double()
    for rule in (RULE, replace(RULE, high=None), replace(RULE, level="sequence", aggregate="product", high=None)):
        batch, _ = applied(rule, log_rho=log_rho)
        assert batch["correction_weights"].isfinite().all()
        assert batch["correction_weights"].max() <= e(20) * (1 + 1e-12)
    k3_rule = replace(RULE, metric="k3", level="sequence", aggregate="mean", action="mask", high=0.01)
    assert applied(k3_rule, log_rho=log_rho)[0]["rejected"].all()


def test_a_nan_is_not_rejected_in_silence():
    """It reaches the loss, where the run stops and says which rows."""
    log_rho = LOG_RHO.clone()
    log_rho[0, 1] = NAN
    batch, _ = applied(replace(RULE, level="sequence", aggregate="geometric", low=0.5), log_rho=log_rho)
    assert batch["loss_mask"].equal(KEEP)
    assert batch["correction_weights"][0, 1:].isnan().all()
    assert batch["correction_weights"][1:].isfinite().all()
    mask = replace(RULE, level="sequence", aggregate="geometric", action="mask", low=0.5, high=3.0)
    assert applied(mask, log_rho=log_rho)[0]["rejected"].tolist() == [False, False, False]


def test_float32_stays_float32():
    batch, logprobs = with_ratio()
    batch["rollout_logprobs"] = batch["rollout_logprobs"].float()
    found, _ = applied(RULE, normalize=True, given=(batch, logprobs.float()))
    assert found["correction_weights"].dtype == torch.float32
