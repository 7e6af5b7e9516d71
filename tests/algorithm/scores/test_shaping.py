"""Shapings of single rows and of lengths, against numbers worked by hand."""

import math

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import SHAPINGS
from rft.algorithm.scores.shaping import clip_scores, cosine_length, kimi_length, overlong, truncated

F64 = torch.float64
NONE = torch.nan
OVERLONG = {"of": "answer", "max_tokens": 20, "buffer": 0.4, "factor": 1.0}


def lengths(*numbers):
    mask = torch.arange(40) < torch.tensor(numbers)[:, None]
    return TensorDict({"response_mask": mask}, batch_size=[len(numbers)])


def test_overlong_by_hand():
    found = overlong(torch.ones(5), lengths(5, 12, 16, 20, 30), **OVERLONG | {"factor": 2.0})
    assert found.tolist() == [1, 1, 0, -1, -1]
    assert found.dtype == torch.float32


def test_overlong_without_a_buffer_punishes_only_beyond_the_limit():
    found = overlong(torch.zeros(3), lengths(19, 20, 21), **OVERLONG | {"buffer": 0.0})
    assert found.tolist() == [0, 0, -1]


def test_overlong_counts_trained_tokens_and_not_the_prompt():
    batch = lengths(20)
    batch["response_mask"][0, ::2] = False
    found = overlong(torch.zeros(1), batch, **OVERLONG | {"max_tokens": 12, "buffer": 1 / 3})
    assert found.tolist() == [-0.5]  # 10 trained tokens


def episodes(*rows):
    """Rows of a prompt token and answers of these lengths, each behind two tokens of a tool."""
    turns = [[0] + [turn for number, size in enumerate(row, 1) for turn in (0, 0, *[number] * size)] for row in rows]
    turn = torch.tensor([row + [0] * (60 - len(row)) for row in turns])
    terms = TensorDict({"right": torch.ones(len(rows), dtype=F64)}, batch_size=[len(rows)])
    columns = {"turn": turn, "response_mask": turn > 0, "terms": terms, "group": torch.zeros(len(rows)).long()}
    return TensorDict(columns, batch_size=[len(rows)])


def test_lengths_of_episodes_by_hand():
    """Of an episode the longest answer is compared with the limit of one, or all of them with a limit of all."""
    batch, zeros = episodes([11, 11], [4, 16, 4], [20], [2, 24]), torch.zeros(4, dtype=F64)
    found = {of: overlong(zeros, batch, **OVERLONG | {"of": of}) for of in ("answer", "episode")}
    # from 12 on, over 8 tokens; the longest answers have 11, 16, 20 and 24 tokens, all of them 22, 24, 20 and 26
    assert found["answer"].tolist() == [0, -0.5, -1, -1] and found["episode"].tolist() == [-1, -1, -1, -1]
    found = overlong(zeros, batch, **OVERLONG | {"of": "episode", "max_tokens": 32, "buffer": 0.5})
    assert found.tolist() == [-0.375, -0.5, -0.25, -0.625]
    # at 24 of 24 the value is 1, at 12 of 24 half of the way from 2: 1.5; at 16 of 24 a quarter of it: 1.25
    batch = episodes([12, 12], [16, 2], [24])
    for of, expected in (("answer", [1.5, 1.25, 1.0]), ("episode", [1.0, 1 + (1 - 0.5**0.5) / 2, 1.0])):
        found = cosine_length(zeros[:3], batch, **COSINE | {"of": of, "max_tokens": 24})
        assert found.tolist() == pytest.approx(expected, abs=1e-12)
    found = kimi_length(zeros[:3], episodes([10, 10], [18], [3, 8, 3]), term="right", factor=1.0)
    assert found.tolist() == pytest.approx([-0.5, -0.5 + 1 / 3, 0.5], abs=1e-12)  # 20, 18 and 14 tokens


def test_a_row_without_a_trained_token_has_no_length():
    batch = episodes([3, 5], [40])
    batch["response_mask"][1] = False
    assert overlong(torch.zeros(2), batch, **OVERLONG | {"max_tokens": 5, "buffer": 0.8}).tolist() == [-1, 0]


def test_truncated_rows_get_another_score():
    batch = TensorDict({"truncated": torch.tensor([True, False, True])}, batch_size=[3])
    scores = torch.tensor([1.0, 1.0, -0.5], dtype=F64)
    assert truncated(scores, batch, factor=0.5, offset=0.0).tolist() == [0.5, 1.0, -0.25]
    assert truncated(scores, batch, factor=0.0, offset=-0.5).tolist() == [-0.5, 1.0, -0.5]


def test_clip_scores_has_two_sides():
    found = clip_scores(torch.tensor([-3.0, -1.0, 0.5, 2.0, 100.0]), TensorDict(), low=-1.0, high=2.0)
    assert found.tolist() == [-1.0, -1.0, 0.5, 2.0, 2.0]


@pytest.mark.parametrize("high", [1.0, 0.5])
def test_clip_scores_refuses_bounds_that_leave_nothing_between_them(high):
    node = {"name": "clip_scores", "low": 1.0, "high": high}
    with pytest.raises(ValueError, match=rf"^here\.low=1\.0: it must be below high={high}$"):
        SHAPINGS.build(node, "here")


COSINE = {
    "term": "right",
    "of": "answer",
    "max_tokens": 12,
    "right_short": 2.0,
    "right_long": 1.0,
    "wrong_short": -10.0,
    "wrong_long": 0.0,
    "at_limit": None,
}


def answers(right, *numbers):
    batch = lengths(*numbers)
    batch["terms"] = TensorDict({"right": torch.tensor(right, dtype=F64)}, batch_size=[len(numbers)])
    return batch


def test_cosine_length_by_hand():
    batch = answers([1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0], 0, 4, 12, 0, 4, 12, 20, 6)
    found = cosine_length(torch.full((8,), 0.5, dtype=F64), batch, **COSINE)
    # cos(pi / 3) = 1 / 2: 3 / 4 of the way from long to short; beyond the limit the curve does not come back
    expected = [2.5, 0.5 + 1.75, 1.5, -9.5, 0.5 - 7.5, 0.5, 1.5, 0.5 - 5]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=F64), rtol=0, atol=1e-12)


def test_cosine_length_has_the_numbers_of_open_r1_without_a_score_of_its_own():
    def reward(length, right):
        """`get_cosine_scaled_reward` with its defaults, written out for `max_len` 12."""
        low, high = (0.5, 1.0) if right else (-0.5, -1.0)
        return low + 0.5 * (high - low) * (1.0 + math.cos(length / 12 * math.pi))

    options = COSINE | {"right_short": 1.0, "right_long": 0.5, "wrong_short": -1.0, "wrong_long": -0.5}
    rows = [(1.0, 3), (0.0, 3), (1.0, 11), (0.0, 11)]
    batch = answers([right for right, _ in rows], *(length for _, length in rows))
    expected = [reward(length, right) for right, length in rows]
    assert cosine_length(torch.zeros(4, dtype=F64), batch, **options).tolist() == pytest.approx(expected, abs=1e-12)


def test_at_the_limit_right_and_wrong_answers_have_one_value():
    batch = answers([1.0, 0.0, 1.0, 1.0], 12, 13, 11, 0)
    found = cosine_length(torch.zeros(4, dtype=F64), batch, **COSINE | {"at_limit": -3.0})
    assert found[:2].tolist() == [-3.0, -3.0]
    assert 1.0 < found[2] < 1.1 and found[3] == 2.0


def test_cosine_length_leaves_rows_that_the_term_does_not_score():
    batch = answers([NONE, NONE], 3, 30)
    for limit in (None, -3.0):
        found = cosine_length(torch.tensor([0.5, 0.25]), batch, **COSINE | {"at_limit": limit})
        assert found.tolist() == [0.5, 0.25] and found.dtype == torch.float32


def test_kimi_length_by_hand():
    batch = answers([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0], 2, 2, 6, 10, 10, 7, 7)
    batch["group"] = torch.tensor([3, 3, 3, 3, 3, 1, 1])
    found = kimi_length(torch.ones(7, dtype=F64), batch, term="right", factor=2.0)
    # group 3: from 2 to 10 tokens; a short wrong answer gains nothing, a long one loses. Group 1: one length
    assert found.tolist() == [2.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]


def test_kimi_length_leaves_rows_that_the_term_does_not_score_and_counts_their_lengths():
    batch = answers([1.0, NONE, 1.0], 2, 10, 4)
    batch["group"] = torch.zeros(3, dtype=torch.int64)
    found = kimi_length(torch.zeros(3), batch, term="right", factor=1.0)
    assert found.tolist() == [0.5, 0.0, 0.25] and found.dtype == torch.float32


def test_length_counts_the_tokens_of_the_policy():
    batch = answers([1.0, 1.0], 8, 8)
    batch["response_mask"][0, 1::2] = False  # tool output: 4 tokens are left
    batch["group"] = torch.zeros(2, dtype=torch.int64)
    assert kimi_length(torch.zeros(2), batch, term="right", factor=1.0).tolist() == [0.5, -0.5]
    found = cosine_length(torch.zeros(2, dtype=F64), batch, **COSINE | {"max_tokens": 8})
    assert found.tolist() == pytest.approx([1.5, 1.0], abs=1e-12)
