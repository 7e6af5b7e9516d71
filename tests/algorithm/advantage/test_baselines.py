"""Advantages against a group: numbers by hand, identities between estimators, degenerate groups, empty ranks."""

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.advantage.baselines import cpgd, gdpo, gpg, opo, reinforce_pp_baseline, rloo, rloo_whitened
from rft.algorithm.advantage.group import dr_grpo, group_norm
from rft.algorithm.advantage.objectives import maxrl, pass_at_k
from rft.algorithm.statistics import whitened
from tests.algorithm.advantage.test_group import rows_of
from tests.helpers import batch_of

F64 = torch.float64
RAGGED = [[0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 0, 1]]  # 3, 1, 1 and 2 trained tokens


def alone(tensor):
    return tensor


def of_terms(terms, group, keep=None, **weights):
    """`gdpo` of {term: raw values}."""
    columns = {name: torch.tensor(values, dtype=F64) for name, values in terms.items()}
    batch = batch_of(keep or [[0, 1]] * len(group), group, terms=TensorDict(columns, batch_size=[len(group)]))
    nothing = torch.full((len(group),), torch.nan, dtype=F64)  # neither scores nor rewards are looked at
    return gdpo(nothing, nothing[:, None], batch, all_sum=alone, term_weights=weights)["advantages"]


def close(found, expected, rtol=1e-14):
    expected = torch.as_tensor(expected, dtype=F64) if isinstance(expected, list) else expected
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-14)


SCORES, GROUP = [1.0, 2.0, 0.0, 4.0, 0.0, 0.0], [7, 3, 7, 3, 7, 7]
RANDOM = torch.randn(12, dtype=F64, generator=torch.Generator().manual_seed(0))
THREE_GROUPS = [0] * 3 + [1] * 4 + [2] * 5
ESTIMATORS = [
    (dr_grpo, {}),
    (rloo, {}),
    (rloo_whitened, {"all_sum": alone}),
    (opo, {}),
    (gpg, {"all_sum": alone, "scale": "none"}),
    (gpg, {"all_sum": alone, "scale": "group"}),
    (cpgd, {"all_sum": alone, "max_weight": 3.0}),
    (group_norm, {"all_sum": alone, "scale": "group"}),
    (group_norm, {"all_sum": alone, "scale": "batch"}),
    (reinforce_pp_baseline, {"all_sum": alone}),
    (pass_at_k, {"scale": False}),
    (pass_at_k, {"scale": True}),
    (maxrl, {"order": "n-1"}),
]


def test_opo_by_hand():
    scores = torch.tensor([1.0, 0.0, 2.0, 4.0], dtype=F64)
    found = opo(scores, torch.zeros(4, 4), batch_of(RAGGED))["advantages"]
    # baseline (3 * 1 + 1 * 0 + 1 * 2 + 2 * 4) / 7 = 13 / 7
    close(found, [[0, -6 / 7, -6 / 7, -6 / 7], [0, 0, -13 / 7, 0], [0, 1 / 7, 0, 0], [0, 15 / 7, 0, 15 / 7]])


def test_opo_leaves_a_row_without_trained_tokens_out_of_the_baseline():
    batch = batch_of([[0, 1, 0], [0, 0, 0], [0, 1, 1]])
    found = opo(torch.tensor([3.0, 100.0, 0.0], dtype=F64), torch.zeros(3, 3), batch)["advantages"]
    assert found.tolist() == [[0, 2, 0], [0, 0, 0], [0, -1, -1]]


def test_opo_with_equal_lengths_is_dr_grpo():
    close(rows_of(opo, RANDOM, THREE_GROUPS), rows_of(dr_grpo, RANDOM, THREE_GROUPS))


def test_group_norm_without_scale_is_dr_grpo():
    found = rows_of(group_norm, RANDOM, THREE_GROUPS, all_sum=alone, scale="none")
    assert torch.equal(found, rows_of(dr_grpo, RANDOM, THREE_GROUPS))


def test_reinforce_pp_baseline_by_hand():
    batch = batch_of([[0, 1, 1], [0, 0, 1]])
    found = reinforce_pp_baseline(torch.tensor([1.0, 0.0], dtype=F64), torch.zeros(2, 3), batch, all_sum=alone)
    # tokens 0.5, 0.5, -0.5: mean 1/6, variance (1/9 + 1/9 + 4/9) / 2
    close(found["advantages"], torch.tensor([[0, 1, 1], [0, 0, -2]], dtype=F64) / 3 / (1 / 3 + 1e-8) ** 0.5)


def test_gpg_by_hand():
    # of seven rows, four are in a group with a signal; the group of one and the tied one have none
    found = rows_of(gpg, [1.0, 0.0, 0.0, 0.0, 5.0, 2.0, 2.0], [0, 0, 0, 0, 1, 2, 2], all_sum=alone, scale="none")
    close(found, [7 / 4 * a for a in (0.75, -0.25, -0.25, -0.25, 0, 0, 0)])


def test_gpg_by_the_standard_deviation_of_the_group_by_hand():
    # six rows, four in groups with a signal; deviations of 1 and -1 have the variance 2, of 2 and -2 the variance 8
    found = rows_of(gpg, [3.0, 1.0, 0.0, 4.0, 5.0, 5.0], [0, 0, 1, 1, 2, 2], all_sum=alone, scale="group")
    first, second = 1.5 / (2**0.5 + 1e-6), 1.5 * 2 / (8**0.5 + 1e-6)
    close(found, [first, -first, -second, second, 0, 0])


@pytest.mark.parametrize(("max_weight", "weight"), [(10.0, 4.0), (3.0, 3.0)])
def test_cpgd_by_hand(max_weight, weight):
    # one group of four has a signal, however many rows it has
    found = rows_of(
        cpgd, [1.0, 0.0, 0.0, 0.0, 5.0, 2.0, 2.0, 1.0], [0, 0, 0, 0, 1, 2, 2, 3], all_sum=alone, max_weight=max_weight
    )
    close(found, [weight * a for a in (0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0)])


def test_gpg_and_cpgd_are_dr_grpo_where_every_group_has_a_signal():
    expected = rows_of(dr_grpo, RANDOM, THREE_GROUPS)
    close(rows_of(gpg, RANDOM, THREE_GROUPS, all_sum=alone, scale="none"), expected)
    close(rows_of(cpgd, RANDOM, THREE_GROUPS, all_sum=alone, max_weight=3.0), expected)


def test_gpg_and_cpgd_count_over_all_ranks():
    """The other rank has three rows in two groups, none with a signal."""
    found = rows_of(gpg, [1.0, 0.0], [0, 0], all_sum=lambda local: local + torch.tensor([3.0, 0.0]), scale="none")
    assert found.tolist() == [2.5 * 0.5, -2.5 * 0.5]
    found = rows_of(cpgd, [1.0, 0.0], [0, 0], all_sum=lambda local: local + torch.tensor([2.0, 0.0]), max_weight=9.0)
    assert found.tolist() == [1.5, -1.5]


def test_pass_at_k_by_hand():
    found = rows_of(pass_at_k, SCORES, GROUP, scale=False)
    assert found.tolist() == [1, 0, 0, 2, 0, 0]
    found = rows_of(pass_at_k, SCORES, GROUP, scale=True)
    close(found, [1 / (0.5 + 1e-6), 0, 0, 2 / (2**0.5 + 1e-6), 0, 0])
    assert rows_of(pass_at_k, [-3.0, -1.0, -1.5], [0, 0, 0], scale=False).tolist() == [0, 0.5, 0]


@pytest.mark.parametrize("second", [0.3, 0.30000004])
def test_pass_at_k_gives_nothing_to_several_best_rows(second):
    scores = torch.tensor([0.3, second, 0.0])
    assert rows_of(pass_at_k, scores, [0, 0, 0], scale=True).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("order", "failed"), [("n-1", 0.0), ("n", -1.0)])
def test_maxrl_by_hand(order, failed):
    found = rows_of(maxrl, [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1, 2, 2, 3], order=order)
    assert found.tolist() == [3, -1, -1, -1, failed, failed, 0, 0, failed]


@pytest.mark.parametrize(("order", "terms"), [("n-1", 3), ("n", 4)])
def test_maxrl_is_the_log_likelihood_to_its_order(order, terms):
    """Every outcome of four rows with a rate of success p; the score function of p is (R - p) / (p (1 - p))."""
    p, n = 0.3, 4
    outcomes = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=F64)] * n)  # (16, n)
    chances = (p * outcomes + (1 - p) * (1 - outcomes)).prod(dim=1)  # (16,)
    group = torch.arange(len(outcomes)).repeat_interleave(n).tolist()
    advantages = rows_of(maxrl, outcomes.flatten(), group, order=order).reshape(-1, n)
    found = (chances[:, None] * advantages * (outcomes - p) / (p * (1 - p))).sum() / n
    close(found, torch.tensor(sum((1 - p) ** k for k in range(terms)), dtype=F64), rtol=1e-12)


def test_pass_at_k_is_the_gradient_of_the_best_score():
    """Scores 0, 1 and 3 with chances of a softmax: sum over rows of A grad log p against autograd."""
    logits, values, n = torch.tensor([0.1, 0.4, -0.3], dtype=F64, requires_grad=True), torch.tensor([0.0, 1, 3]), 3
    logprobs = logits.log_softmax(0)
    draws = torch.cartesian_prod(*[torch.arange(3)] * n)  # (27, n)
    scores = values[draws].double()
    chances = logprobs[draws].sum(dim=1).exp()
    (expected,) = torch.autograd.grad((chances * scores.amax(dim=1)).sum(), logits, retain_graph=True)
    group = torch.arange(len(draws)).repeat_interleave(n).tolist()
    advantages = rows_of(pass_at_k, scores.flatten(), group, scale=False).reshape(-1, n)
    (found,) = torch.autograd.grad((chances.detach()[:, None] * advantages * logprobs[draws]).sum(), logits)
    close(found, expected, rtol=1e-12)


def test_gdpo_by_hand():
    # term a: +-1/sqrt(2) in the first group, tied in the second; term b: tied, then +-1/sqrt(2)
    found = of_terms({"a": [1, 0, 5, 5], "b": [2, 2, 0, 4]}, [0, 0, 1, 1], a=1.0, b=3.0)[:, 1]
    first, second = 0.5 / (0.5**0.5 + 1e-6), 3 * 2 / (8**0.5 + 1e-6)
    sd = ((2 * first**2 + 2 * second**2) / 3 + 1e-8) ** 0.5
    close(found, [first / sd, -first / sd, -second / sd, second / sd])


def test_gdpo_with_one_term_is_whitened_group_norm():
    normed = rows_of(group_norm, RANDOM, THREE_GROUPS, all_sum=alone, scale="group")
    expected = whitened(normed, torch.ones(12, dtype=torch.bool), alone)
    found = of_terms({"a": RANDOM.tolist()}, THREE_GROUPS, a=1.0)[:, 1]
    close(found, expected)
    close(
        of_terms({"a": RANDOM.tolist()}, THREE_GROUPS, a=7.0)[:, 1], expected, rtol=1e-8
    )  # up to the 1e-8 in the root


def test_gdpo_whitens_over_rows_whatever_their_lengths():
    short = of_terms({"a": [1, 0, 0, 0]}, [0] * 4, keep=[[0, 1, 0, 0]] * 4, a=1.0)[:, 1]
    ragged = of_terms({"a": [1, 0, 0, 0]}, [0] * 4, keep=RAGGED, a=1.0)
    assert ragged[torch.tensor(RAGGED).bool()].tolist() == short.repeat_interleave(torch.tensor([3, 1, 1, 2])).tolist()


@pytest.mark.parametrize(("advantage", "options"), ESTIMATORS)
@pytest.mark.parametrize("scores", [torch.full((8,), 0.3), torch.tensor([0.3] * 6 + [0.30000004, 0.3])])
def test_equal_scores_and_a_group_of_one_get_exactly_zero(advantage, options, scores):
    assert rows_of(advantage, scores, [0] * 7 + [1], **options).tolist() == [0.0] * 8


@pytest.mark.parametrize("value", [0.3, 0.1, 1 / 3])
def test_equal_terms_get_exactly_zero(value):
    assert not of_terms({"a": [value] * 7, "b": [value] * 7}, [0] * 7, a=0.3, b=0.7).any()


@pytest.mark.parametrize(("advantage", "options"), [*ESTIMATORS, (maxrl, {"order": "n"})])
def test_a_rank_without_rows_sums_as_often_as_the_others(advantage, options):
    def calls_of(rows):
        calls = []
        counted = {"all_sum": lambda local: calls.append(local.shape) or local} if "all_sum" in options else {}
        batch = (
            batch_of([[0, 1, 1]] * rows)
            if rows
            else TensorDict(
                {"loss_mask": torch.zeros(0, 3, dtype=torch.bool), "group": torch.zeros(0, dtype=torch.int64)},
                batch_size=[0],
            )
        )
        scores = torch.arange(rows).float()
        found = advantage(scores, torch.zeros(rows, 3), batch, **{**options, **counted})["advantages"]
        assert found.shape == (rows, 3)
        return calls

    assert calls_of(0) == calls_of(3)


def test_gdpo_of_a_rank_without_rows():
    empty = torch.zeros(0)
    columns = {"loss_mask": torch.zeros(0, 3, dtype=torch.bool), "group": torch.zeros(0, dtype=torch.int64)}
    batch = TensorDict({**columns, "terms": TensorDict({"a": empty}, batch_size=[0])}, batch_size=[0])
    calls = []
    found = gdpo(empty, torch.zeros(0, 3), batch, all_sum=lambda x: calls.append(x) or x, term_weights={"a": 1.0})
    assert found["advantages"].shape == (0, 3)
    assert len(calls) == 2
