"""Rows that are redrawn with weight |score|^power."""

import pytest
import torch
from tensordict import TensorDict

from rft.algorithm import SELECTIONS
from rft.algorithm.scores.selections import resample_counts


def test_as_many_rows_as_before_and_none_of_weight_zero():
    scores = torch.tensor([0.0, 1.0, -2.0, 0.0, 3.0, 0.0])
    for seed in range(50):
        counts = resample_counts(scores, 2.0, seed)
        assert counts.sum() == 6 and not counts[scores == 0].any()
    assert len({tuple(resample_counts(scores, 2.0, seed).tolist()) for seed in range(50)}) > 10


@pytest.mark.parametrize(
    ("power", "shares"), [(0.0, [0.25] * 4), (1.0, [0.1, 0.2, 0.3, 0.4]), (2.0, [1 / 30, 4 / 30, 0.3, 16 / 30])]
)
def test_the_shares_are_those_of_the_weights(power, shares):
    scores = torch.tensor([1.0, -2.0, 3.0, -4.0])
    counts = sum(resample_counts(scores, power, seed) for seed in range(4000)).double()
    assert (counts / counts.sum()).tolist() == pytest.approx(shares, abs=0.015)


def test_scores_of_nothing_keep_every_row():
    assert resample_counts(torch.zeros(3), 2.0, 0).tolist() == [1, 1, 1]
    assert resample_counts(torch.zeros(0), 2.0, 0).tolist() == []


def batch_of_scores(scores, group):
    columns = {"scores": torch.tensor(scores), "group": torch.tensor(group), "unit": torch.arange(len(scores))}
    return TensorDict(columns, batch_size=[len(scores)])


def select(node, batch, **supplied):
    return SELECTIONS.build(node, "algorithm.pick")(batch, **supplied)


def test_every_row_once():
    assert select({"name": "all"}, batch_of_scores([1.0, 0.0], [0, 0])) == (None, {})


def test_the_best_row_of_each_group_is_the_first_of_equal_ones():
    counts, columns = select({"name": "best"}, batch_of_scores([0.0, 2.0, 2.0, 5.0, 4.0], [7, 7, 7, 9, 9]))
    assert counts.tolist() == [0, 1, 0, 1, 0] and columns == {}


def test_the_best_and_the_worst_row_are_a_pair_where_they_differ():
    batch = batch_of_scores([0.0, 2.0, 1.0, 3.0, 3.0], [7, 7, 7, 9, 9])
    counts, columns = select({"name": "best_and_worst"}, batch)
    assert counts.tolist() == [1, 1, 0, 0, 0]
    assert columns["chosen"].tolist()[:3] == [False, True, False]
    assert columns["unit"].tolist()[:3] == [1, 1, 2]


def test_rows_are_drawn_over_all_ranks():
    whole = batch_of_scores([1.0, -2.0, 3.0, 0.0], [0, 0, 1, 1])
    rows = list(zip(whole["unit"].tolist(), whole["scores"].tolist(), strict=True))
    node = {"name": "resample", "power": 2.0}
    counts, _ = select(node, whole, all_rows=lambda local: [local], seed=3)
    halves = [select(node, whole[half], all_rows=lambda local: [rows[2:], rows[:2]], seed=3)[0] for half in
              (slice(0, 2), slice(2, 4))]  # fmt: skip
    assert torch.cat(halves).tolist() == counts.tolist() and counts.sum() == 4 and counts[3] == 0


def test_a_power_below_zero_is_refused():
    with pytest.raises(ValueError, match=r"^algorithm\.pick\.power=-1\.0: it must be at least 0"):
        select({"name": "resample", "power": -1.0}, None)
