"""Per-token rewards and shaping."""

import torch
from tensordict import TensorDict

from rft.algorithm.scores.rewards import token_rewards
from rft.algorithm.scores.shaping import overlong

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


def lengths(*numbers):
    mask = torch.arange(40) < torch.tensor(numbers)[:, None]
    return TensorDict({"response_mask": mask}, batch_size=[len(numbers)])


def test_overlong_by_hand():
    found = overlong(torch.ones(5), lengths(5, 12, 16, 20, 30), max_tokens=20, buffer=0.4, factor=2.0)
    assert found.tolist() == [1, 1, 0, -1, -1]
    assert found.dtype == torch.float32


def test_overlong_without_a_buffer_punishes_only_beyond_the_limit():
    found = overlong(torch.zeros(3), lengths(19, 20, 21), max_tokens=20, buffer=0, factor=1.0)
    assert found.tolist() == [0, 0, -1]


def test_overlong_counts_trained_tokens_and_not_the_prompt():
    batch = lengths(20)
    batch["response_mask"][0, ::2] = False
    found = overlong(torch.zeros(1), batch, max_tokens=12, buffer=1 / 3, factor=1.0)
    assert found.tolist() == [-0.5]  # 10 trained tokens
