"""Losses of preferences against numbers worked by hand, and against what their papers say of them."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import LOSSES
from rft.algorithm.loss.preference import chosen_nll, cpo, dpo, hinge, ipo, kto, kto_baseline, orpo, robust_dpo, simpo

F64 = torch.float64
# Two pairs, their rows mixed: rows 0 and 2, rows 3 and 1.
KEEP = torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
CHOSEN = torch.tensor([True, False, False, True])
UNIT = torch.tensor([7, 3, 7, 3])
GAINS = [[9.0, 0.5, 1.5, 9.0], [9.0, 9.0, 2.0, 9.0], [9.0, -1.0, 9.0, 9.0], [9.0, 0.5, 0.25, 0.25]]
H = (3.0, -1.0)  # 2 - (-1), and 1 - 2
MEAN_H = (1 - (-1), 1 / 3 - 2)


def rows(gains=GAINS, keep=KEEP, reference=-2.0):
    """A batch, and log-probabilities that are so much above the reference."""
    columns = {
        "loss_mask": keep,
        "chosen": CHOSEN,
        "unit": UNIT,
        "ref_logprobs": torch.full(keep.shape, reference, dtype=F64),
    }
    logprobs = columns["ref_logprobs"] + torch.tensor(gains, dtype=F64)
    return logprobs.requires_grad_(), TensorDict(columns, batch_size=[len(keep)])


def of_pairs(values):
    """The values of the two pairs; both rows of each have it."""
    first, other, again, second = values.tolist()
    assert first == again and other == second
    return first, second


def ln_sigmoid(x):
    return -math.log1p(math.exp(-x))


def loss_of(function, gains=GAINS, **options):
    logprobs, batch = rows(gains)
    return of_pairs(function(logprobs, batch, **options)[0].detach())


def slopes(function, gains, **options):
    """The gradient of the mean over pairs by the trained tokens, times the number of pairs."""
    logprobs, batch = rows(gains)
    loss, _ = function(logprobs, batch, **options)
    (found,) = torch.autograd.grad(loss.sum() / 2, logprobs)
    assert not found[~KEEP].any()
    return found


def test_losses_by_hand():
    beta = 0.5
    assert loss_of(dpo, beta=beta, label_smoothing=0.0) == pytest.approx([-ln_sigmoid(beta * h) for h in H])
    expected = [-0.9 * ln_sigmoid(beta * h) - 0.1 * ln_sigmoid(-beta * h) for h in H]
    assert loss_of(dpo, beta=beta, label_smoothing=0.1) == pytest.approx(expected)
    expected = [(-0.8 * ln_sigmoid(beta * h) + 0.2 * ln_sigmoid(-beta * h)) / 0.6 for h in H]
    assert loss_of(robust_dpo, beta=beta, label_smoothing=0.2) == pytest.approx(expected)
    assert loss_of(ipo, beta=beta, average=False) == pytest.approx([(3 - 1) ** 2, (-1 - 1) ** 2])
    assert loss_of(ipo, beta=beta, average=True) == pytest.approx([(h - 1) ** 2 for h in MEAN_H])
    assert loss_of(hinge, beta=beta) == (0.0, 1.5)
    # log-probabilities are 2 less: sums -2, 0, -3, -5, means -1, 0, -3, -5 / 3
    assert loss_of(cpo, beta=beta) == pytest.approx([-ln_sigmoid(beta * 1), -ln_sigmoid(beta * -5)])
    expected = [-ln_sigmoid(2 * 2 - 1), -ln_sigmoid(2 * -5 / 3 - 1)]
    assert loss_of(simpo, beta=2.0, gamma=1.0) == pytest.approx(expected)
    assert loss_of(chosen_nll) == pytest.approx([1, 5 / 3])


def test_the_odds_ratio_by_hand():
    shifted = [[gain - 1 for gain in row] for row in GAINS]  # log-probabilities 3 less: means -2, -1, -4, -8 / 3

    def odds(mean):
        return math.exp(mean) / (1 - math.exp(mean))

    ratios = [math.log(odds(-2) / odds(-4)), math.log(odds(-8 / 3) / odds(-1))]
    assert loss_of(orpo, shifted, weight=0.1) == pytest.approx([-0.1 * ln_sigmoid(ratio) for ratio in ratios])
    logprobs, batch = rows([[2.0] * 4] * 4)  # all are certain
    loss, _ = orpo(logprobs, batch, weight=0.1)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert of_pairs(loss.detach()) == pytest.approx([0.1 * math.log(2)] * 2) and gradient.isfinite().all()


def test_statistics_are_those_of_the_pair():
    _, found = dpo(*rows(), beta=0.5, label_smoothing=0.0)
    assert {name.removeprefix("preference/"): of_pairs(values) for name, values in found.items()} == {
        "accuracy": (1.0, 0.0),
        "margin": (1.5, -0.5),
        "reward_chosen": (1.0, 0.5),
        "reward_rejected": (-0.5, 1.0),
        "logprob_chosen": (-2.0, -5.0),
        "logprob_rejected": (-3.0, 0.0),
    }
    assert not any(values.requires_grad for values in found.values())
    _, found = simpo(*rows(), beta=2.0, gamma=1.0)
    assert of_pairs(found["preference/reward_chosen"]) == pytest.approx((-2.0, -10 / 3))
    assert of_pairs(found["preference/margin"]) == pytest.approx((4.0, -10 / 3))


ZERO = [[0.0] * 4] * 4
SIGN = torch.where(KEEP, torch.where(CHOSEN, 1.0, -1.0)[:, None], 0.0).double()


@pytest.mark.parametrize(
    ("function", "options", "slope"),
    [
        (dpo, {"beta": 0.4, "label_smoothing": 0.0}, 0.2),
        (dpo, {"beta": 0.4, "label_smoothing": 0.25}, 0.1),
        (robust_dpo, {"beta": 0.4, "label_smoothing": 0.25}, 0.4),
        (ipo, {"beta": 0.4, "average": False}, 2.5),
        (hinge, {"beta": 0.4}, 0.4),
    ],
)
def test_where_policy_and_reference_are_one_all_pairs_are_pulled_alike(function, options, slope):
    torch.testing.assert_close(slopes(function, ZERO, **options), -slope * SIGN)


def test_ipo_wants_nothing_more_at_its_target():
    at_target = [[9.0, 2.0, 1.0, 9.0], [9.0, 9.0, -1.5, 9.0], [9.0, 1.0, 9.0, 9.0], [9.0, 0.5, 0.25, -0.25]]
    assert loss_of(ipo, at_target, beta=0.25, average=False) == (0.0, 0.0)
    assert not slopes(ipo, at_target, beta=0.25, average=False).any()


def test_cdpo_rests_where_the_model_is_as_sure_as_the_labels():
    sure = math.log(0.8 / 0.2) / 0.5
    gains = [[9.0, sure, 0.0, 9.0], [9.0, 9.0, 0.0, 9.0], [9.0, 0.0, 9.0, 9.0], [9.0, sure, 0.0, 0.0]]
    assert slopes(dpo, gains, beta=0.5, label_smoothing=0.2).abs().max() < 1e-15


def test_robust_dpo_is_dpo_on_average_over_flipped_labels():
    turned = [[-gain for gain in row] for row in GAINS]
    options = {"beta": 0.5, "label_smoothing": 0.2}
    kept, flipped = loss_of(robust_dpo, **options), loss_of(robust_dpo, turned, **options)
    mean = [0.8 * k + 0.2 * f for k, f in zip(kept, flipped, strict=True)]
    assert mean == pytest.approx(loss_of(dpo, beta=0.5, label_smoothing=0.0))


def test_doubled_rows_are_the_same_to_simpo_and_not_to_cpo():
    logprobs, batch = rows()
    twice = TensorDict({name: column for name, column in batch.items()}, batch_size=[4])
    twice["loss_mask"] = torch.cat([KEEP, KEEP], dim=1)
    doubled = torch.cat([logprobs, logprobs], dim=1)
    same = simpo(logprobs, batch, beta=2.0, gamma=1.0)[0], simpo(doubled, twice, beta=2.0, gamma=1.0)[0]
    torch.testing.assert_close(*same)
    assert not torch.allclose(cpo(logprobs, batch, beta=2.0)[0], cpo(doubled, twice, beta=2.0)[0])


def test_cpo_is_dpo_to_a_reference_that_is_even():
    logprobs, batch = rows(reference=0.0)
    found, _ = cpo(logprobs, batch, beta=0.3)
    torch.testing.assert_close(found, dpo(logprobs, batch, beta=0.3, label_smoothing=0.0)[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (dpo, {"beta": 0.5, "label_smoothing": 0.0}),
        (ipo, {"beta": 0.5, "average": True}),
        (simpo, {"beta": 0.5, "gamma": 1.0}),
        (orpo, {"weight": 0.1}),
        (chosen_nll, {}),
    ],
)
def test_half_a_pair_is_none(function, options):
    keep = KEEP.clone()
    keep[2] = False
    logprobs, batch = rows(keep=keep, reference=-4.0)
    loss, statistics = function(logprobs, batch, **options)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert not loss[[0, 2]].any() and not gradient[[0, 2]].any() and gradient[[1, 3]].any()
    assert not any(values[[0, 2]].any() for values in statistics.values())


def judged(gains=GAINS, label=(True, False, True, False), mismatched=(False, False, True, True)):
    logprobs, batch = rows(gains)
    batch["label"], batch["mismatched"] = torch.tensor(label), torch.tensor(mismatched)
    return logprobs, batch


def prepared(logprobs, batch):
    for name, column in kto_baseline(logprobs.detach(), batch, all_sum=lambda tensor: tensor).items():
        batch[name] = column
    return logprobs, batch


KTO = {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 1.0}


def test_kto_by_hand():
    gains = [GAINS[0], GAINS[1], [9.0, 3.0, 9.0, 9.0], GAINS[3]]  # of the mismatched: 3 and 1
    logprobs, batch = prepared(*judged(gains))
    assert batch["kl_baseline"].tolist() == [2.0] * 4
    loss, found = kto(logprobs, batch, **KTO)
    # the good row is at the baseline, the bad one too
    assert loss.tolist() == pytest.approx([2 * 0.5, 0.5, 0.0, 0.0])
    logprobs, batch = prepared(*judged())  # mean of -1 and 1
    loss, found = kto(logprobs, batch, **KTO)
    assert loss.tolist() == pytest.approx([2 / (1 + math.exp(1)), 1 - 1 / (1 + math.exp(1)), 0.0, 0.0])
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    slope = 0.5 * math.exp(1) / (1 + math.exp(1)) ** 2
    assert gradient[0, 1:3].tolist() == pytest.approx([-2 * slope] * 2) and gradient[1, 2].item() == pytest.approx(
        slope
    )
    assert not gradient[2:].any(), "the baseline has no gradient"
    means = {name.removeprefix("preference/"): float(values.sum() / 2) for name, values in found.items()}
    expected = {"accuracy": 0.5, "margin": 0.0, "baseline": 0.0, "reward_chosen": 1.0, "reward_rejected": 1.0}
    assert means == pytest.approx(expected | {"logprob_chosen": -2.0, "logprob_rejected": 0.0})


def test_means_of_one_label_are_over_the_rows_that_have_it():
    logprobs, batch = prepared(*judged(label=(True, False, False, True), mismatched=(False, False, False, True)))
    assert batch["kl_baseline"].tolist() == [1.0] * 4 and batch["label_scale"][:3].tolist() == [3.0, 1.5, 1.5]
    _, found = kto(logprobs, batch, **KTO)
    means = {name.removeprefix("preference/"): float(values.sum() / 3) for name, values in found.items()}
    assert means["reward_chosen"] == pytest.approx(0.5 * 2) and means["reward_rejected"] == pytest.approx(0.5 * 0.5)
    assert means["accuracy"] == pytest.approx(2 / 3)  # gains of 2 and -1 are on the right side of 1, a bad one's 2 not


def test_a_step_without_mismatched_rows_or_with_one_label_has_finite_numbers():
    _, batch = prepared(*judged(label=(True,) * 4, mismatched=(False,) * 4))
    assert batch["kl_baseline"].tolist() == [0.0] * 4 and batch["label_scale"].tolist() == [1.0] * 4
    logprobs, batch = judged(mismatched=(False, False, True, True))
    batch["loss_mask"] = batch["loss_mask"] & torch.tensor([True, True, False, True])[:, None]
    assert prepared(logprobs, batch)[1]["kl_baseline"].tolist() == [1.0] * 4, "of the one that has a token"


def test_the_baseline_of_kto_is_of_all_ranks_not_below_zero_and_of_what_trains_nothing(over_ranks):
    logprobs, batch = judged()
    batch["ref_logprobs"] = batch["ref_logprobs"] - 1.0  # gains of the mismatched: -1 + 1 and 1 + 3

    def work(part, all_sum):
        return kto_baseline(logprobs.detach()[part], batch[part], all_sum=all_sum)

    parts = over_ranks(work, (torch.tensor([0, 2]), torch.tensor([1, 3])))
    assert all(part["kl_baseline"].tolist() == [2.0, 2.0] for part in parts)
    assert all(part["loss_mask"].any(1).tolist() == [True, False] for part in parts)
    batch["ref_logprobs"] = batch["ref_logprobs"] + 5.0
    assert prepared(logprobs, batch)[1]["kl_baseline"].tolist() == [0.0] * 4


@pytest.mark.parametrize(("name", "share"), [("dpo", 0.5), ("robust_dpo", 0.5), ("dpo", -0.1)])
def test_labels_that_say_nothing_are_refused(name, share):
    node = {"name": name, "beta": 0.1, "label_smoothing": share}
    bound = "at least 0" if share < 0 else "below 0.5"
    with pytest.raises(ValueError, match=rf"label_smoothing={share}: it must be {bound}$"):
        LOSSES.build(node, "algorithm.loss")
