"""PRIME's implicit process reward: its advantage and the loss of its model, by hand."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm.advantage.baselines import rloo
from rft.algorithm.advantage.returns import prime
from rft.algorithm.loss.reward_model import implicit_reward
from tests.helpers import batch_of

F64 = torch.float64
KEEP = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 1], [0, 1, 0, 0]], dtype=torch.bool)


def of_differences(differences, group=(0, 0, 0), keep=KEEP, outcome=(1.0, 0.0, 1.0)):
    """Rows whose log-ratio of the reward model to the reference is given."""
    reference = torch.full(keep.shape, -2.0, dtype=F64)
    terms = TensorDict({"right": torch.tensor(outcome, dtype=F64)}, batch_size=[len(keep)])
    prm = reference + torch.tensor(differences, dtype=F64)
    return batch_of(keep, group, ref_logprobs=reference, prm_logprobs=prm, terms=terms)


def advantages(batch, scores, gamma=1.0, beta=0.5):
    scores = torch.tensor(scores, dtype=F64)
    return prime(scores, torch.zeros(batch["loss_mask"].shape, dtype=F64), batch, beta=beta, gamma=gamma)["advantages"]


DIFFERENCES = [[9.0, 2.0, 4.0, 9.0], [9.0, 2.0, 9.0, -6.0], [9.0, 8.0, 9.0, 9.0]]


def test_advantage_by_hand():
    # process rewards: [1, 2], [1, -3], [4]; their means 1.5, -1, 4; the others' means of means 1.5, 2.75, 0.25
    # outcomes less the others': 3 - (0 + 6) / 2 = 0, 0 - 4.5 = -4.5, 6 - 1.5 = 4.5
    found = advantages(of_differences(DIFFERENCES), [3.0, 0.0, 6.0])
    first = [(1 - 1.5) + (2 - 1.5) + 0.0, (2 - 1.5) + 0.0]
    second = [(1 - 2.75) + (-3 - 2.75) - 4.5, (-3 - 2.75) - 4.5]
    assert found[0].tolist() == pytest.approx([0.0, *first, 0.0])
    assert found[1].tolist() == pytest.approx([0.0, second[0], 0.0, second[1]])
    assert found[2].tolist() == pytest.approx([0.0, (4 - 0.25) + 4.5, 0.0, 0.0])


def test_the_discount_is_per_trained_token_and_of_the_process_alone():
    found = advantages(of_differences(DIFFERENCES), [3.0, 0.0, 6.0], gamma=0.5)
    assert found[1].tolist() == pytest.approx([0.0, -1.75 - 0.5 * 5.75 - 4.5, 0.0, -5.75 - 4.5])


def test_a_reward_model_that_is_the_reference_leaves_leave_one_out():
    batch, scores = of_differences([[0.0] * 4] * 3), torch.tensor([3.0, 0.0, 6.0], dtype=F64)
    expected = rloo(scores, torch.zeros(3, 4, dtype=F64), batch)["advantages"]
    torch.testing.assert_close(advantages(batch, [3.0, 0.0, 6.0]), expected, rtol=0, atol=0)


def test_a_lone_row_gets_nothing():
    found = advantages(of_differences(DIFFERENCES, group=(0, 0, 1)), [3.0, 0.0, 6.0])
    assert not found[2].any() and found[0].any()


@pytest.mark.parametrize("beta", [0.5, 0.05])
def test_loss_is_the_cross_entropy_of_the_outcome(beta):
    batch = of_differences(DIFFERENCES, outcome=(1.0, 0.0, 0.25))
    logprobs = batch["prm_logprobs"].clone().requires_grad_()
    loss, statistics = implicit_reward(logprobs, batch, beta=beta, term="right")
    sums = [6.0, -4.0, 8.0]
    sigmoid = [1 / (1 + math.exp(-beta * total)) for total in sums]
    expected = [-math.log(sigmoid[0]), -math.log(1 - sigmoid[1])]
    expected.append(-0.25 * math.log(sigmoid[2]) - 0.75 * math.log(1 - sigmoid[2]))
    assert loss.tolist() == pytest.approx(expected)
    assert statistics["prm/accuracy"].tolist() == [1.0, 1.0, 0.0]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    rows = [beta * (sigmoid[0] - 1), beta * sigmoid[1], beta * (sigmoid[2] - 0.25)]
    torch.testing.assert_close(gradient, KEEP * torch.tensor(rows, dtype=F64)[:, None])


def test_a_row_without_a_trained_token_counts_nowhere():
    keep = KEEP & torch.tensor([[True], [False], [True]])
    batch = of_differences(DIFFERENCES, keep=keep)
    loss, statistics = implicit_reward(batch["prm_logprobs"], batch, beta=0.5, term="right")
    assert loss[1] == 0.0 and statistics["prm/accuracy"][1] == 0.0
