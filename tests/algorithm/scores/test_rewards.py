"""Per-token rewards."""

import torch
from tensordict import TensorDict

from rft.algorithm.scores.rewards import add_turn_rewards, token_rewards

F64 = torch.float64
KEEP = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
SCORES = torch.tensor([1.0, 2.0, 3.0], dtype=F64)


def test_the_score_is_at_the_last_trained_token():
    row, rewards = token_rewards(SCORES, KEEP, None, 0.5)
    assert row.tolist() == [1, 2, 3]
    assert rewards.tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 3]]


def test_kl_is_taken_off_every_trained_token():
    kl = torch.tensor([[9, 1, 9, 2, 9], [9, 9, 9, 9, 9], [9, 1, 1, 1, -1]], dtype=F64)  # 9: outside keep
    row, rewards = token_rewards(SCORES, KEEP, kl, 0.5)
    assert row.tolist() == [1 - 1.5, 2, 3 - 1]
    assert rewards.tolist() == [[0, -0.5, 0, 0, 0], [0, 0, 0, 0, 0], [0, -0.5, -0.5, -0.5, 3.5]]


def test_rewards_of_turns_are_discounted_by_turn():
    turn = torch.tensor([[0, 1, 0, 2, 3], [0, 1, 0, 2, 2], [1, 1, 2, 2, 3]])
    turn_scores = torch.tensor([[0, 4, 0, 8, 16], [0, 1, 0, 0, 1], [2, 0, 0, 4, 0]], dtype=F64)
    batch = TensorDict({"loss_mask": KEEP, "turn": turn, "turn_scores": turn_scores}, batch_size=[3])
    row, rewards = add_turn_rewards(*token_rewards(SCORES, KEEP, None, 0.0), batch, discount=0.5, weight=2.0)
    assert row.tolist() == [1 + 8 + 8 + 8, 2, 3 + 4]  # nothing trains before the first reward of the last row
    assert rewards.tolist() == [[0, 8, 0, 1 + 8 + 8, 0], [0, 0, 0, 0, 0], [0, 0, 0, 4, 3]]
