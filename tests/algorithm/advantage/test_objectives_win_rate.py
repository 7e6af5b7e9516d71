"""Games against the policy of before: how often an answer wins, and what is made of it."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import ADVANTAGES, LOSSES
from rft.metrics import Metrics
from tests.helpers import plain_algorithm

F64 = torch.float64
SCORES = torch.tensor([1.0, 0.3 * 7, 0.0, 1.0, 0.5, 2.1], dtype=F64)  # 0.3 * 7 is not 2.1, but for rounding
GROUP = torch.tensor([8, 3, 8, 8, 8, 3])


def rates(softness, scores=SCORES, group=GROUP):
    keep = torch.tensor([[False, True, True]] * len(scores))
    advantage = ADVANTAGES.build({"name": "win_rate", "softness": softness}, "algorithm.advantage")
    found = advantage(scores, None, TensorDict({"loss_mask": keep, "group": group}, batch_size=[len(scores)]))
    assert not found["advantages"][:, 0].any()
    assert torch.equal(found["advantages"][:, 1], found["advantages"][:, 2])
    return found["advantages"][:, 1].tolist()


def test_the_win_rate_is_over_the_group_and_the_row_itself_with_ties_one_half():
    # of 1, 0, 1, 1/2: the ones tie with themselves and each other, and win twice
    assert rates(None) == pytest.approx([3 / 4 - 1 / 2, 0, 1 / 8 - 1 / 2, 3 / 4 - 1 / 2, 3 / 8 - 1 / 2, 0])
    assert rates(None, SCORES[:1], GROUP[:1]) == [0]


def test_a_soft_win_is_the_sigmoid_of_the_difference():
    def chance(difference):
        return 1 / (1 + math.exp(-difference / 0.5))

    best = (0.5 + chance(1.0) + 0.5 + chance(0.5)) / 4 - 0.5
    assert rates(0.5)[0] == pytest.approx(best, abs=1e-15)
    assert rates(0.5)[2] == pytest.approx((chance(-1.0) * 2 + 0.5 + chance(-0.5)) / 4 - 0.5, abs=1e-15)
    assert sum(rates(0.5)) == pytest.approx(0, abs=1e-15), "a game of constant sum"


@pytest.mark.parametrize("softness", [0.0, -1.0])
def test_a_softness_divides(softness):
    with pytest.raises(ValueError, match=r"^algorithm\.advantage\.softness=.*: it must be above 0$"):
        rates(softness)


def test_sppo_is_the_squared_distance_of_the_log_ratio_to_eta_times_the_win_rate():
    keep = torch.tensor([[False, True, True], [False, True, False], [False, False, False]])
    reference = torch.tensor([[0.0, -1.0, -2.0], [0.0, -0.5, -9.0], [0.0, 0.0, 0.0]], dtype=F64)
    rows = {"loss_mask": keep, "ref_logprobs": reference, "advantages": keep * torch.tensor([[0.25], [-0.5], [0.1]])}
    batch = TensorDict(rows, batch_size=[3])
    loss = LOSSES.build({"name": "sppo", "eta": 8.0}, "algorithm.loss")
    now = torch.tensor([[0.0, -0.5, -1.5], [0.0, -1.0, -1.0], [0.0, -3.0, 0.0]], dtype=F64, requires_grad=True)
    values, statistics = loss(now, batch)
    assert values.tolist() == pytest.approx([(1.0 - 8 * 0.25) ** 2, (-0.5 + 8 * 0.5) ** 2, 0.0])
    k3 = [(2 * (math.exp(-0.5) - 1 + 0.5)) / 2, math.exp(0.5) - 1 - 0.5, 0.0]
    assert statistics["kl/ref"].tolist() == pytest.approx(k3)
    [gradient] = torch.autograd.grad(values.sum(), now)
    assert gradient.tolist() == [[0, -2, -2], [0, 7, 0], [0, 0, 0]]
    at_reference = reference.clone().requires_grad_()
    [gradient] = torch.autograd.grad(loss(at_reference, batch)[0].sum(), at_reference)
    assert gradient.tolist() == [[0, -4, -4], [0, 8, 0], [0, 0, 0]], "-2 eta (P - 1/2)"


def test_sppo_rests_where_the_policy_is_a_step_of_multiplicative_weights():
    """policy = reference * exp(eta (P - 1/2)) has no gradient."""
    keep = torch.ones(2, 2, dtype=torch.bool)
    reference, wins = torch.full((2, 2), -2.0, dtype=F64), torch.tensor([0.375, -0.375], dtype=F64)
    batch = TensorDict(
        {"loss_mask": keep, "ref_logprobs": reference, "advantages": wins[:, None] * keep}, batch_size=[2]
    )
    now = (reference + 3.0 * wins[:, None] / 2).requires_grad_()
    values, _ = LOSSES.build({"name": "sppo", "eta": 3.0}, "algorithm.loss")(now, batch)
    assert not values.any() and not torch.autograd.grad(values.sum(), now)[0].any()


def test_the_best_and_the_worst_row_may_train_alone_by_their_win_rates_against_all():
    parts = {"advantage": {"name": "win_rate", "softness": None}, "loss": {"name": "sppo", "eta": 8.0}}
    algorithm = plain_algorithm(**parts, aggregation=None, group_size=3, pick="best_and_worst")
    columns = {"response_mask": torch.tensor([[False, True]] * 3), "truncated": torch.zeros(3, dtype=torch.bool)}
    columns |= {"scores": torch.tensor([0.0, 1.0, 0.5]), "group": torch.zeros(3, dtype=torch.int64)}
    batch = TensorDict(columns | {"unit": torch.arange(3)}, batch_size=[3])
    algorithm.build_loss_mask(batch)
    algorithm.estimate_advantages(batch, lambda tensor: tensor, Metrics())
    assert batch["loss_mask"][:, 1].tolist() == [True, True, False]
    assert batch["advantages"][:, 1].tolist() == pytest.approx([-1 / 3, 1 / 3, 0.0])
