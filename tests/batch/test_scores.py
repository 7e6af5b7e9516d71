"""Scores and their absence: groups that fall with one response, counts by reason, numbers for JSON."""

import math
from dataclasses import replace

import pytest
import torch

from rft.batch.collate import collate
from rft.batch.scores import Scores, count_unscored, is_scored, mean_of_scored, number_or_none, spell_reason
from rft.batch.trajectory import Finish, Segment, Trajectory, to_row

NAN = math.nan


def scores():
    return Scores(
        torch.tensor([1.0, NAN, 0.5, 2.0, NAN]),
        {"a": torch.tensor([1.0, NAN, 0.5, 2.0, 0.0]), "b": torch.tensor([0.0, 1.0, 0.0, 0.0, NAN])},
        [{}, {"a": "deadline: 3 s"}, {}, {}, {"b": "ValueError"}],
        torch.tensor([False, True, False, False, False]),
        {},
    )


def test_a_group_falls_with_the_response_that_drops_it():
    assert is_scored(scores().drop_groups([2, 2, 1]).total).tolist() == [False, False, True, True, False]
    assert is_scored(scores().drop_groups([1, 3, 1]).total).tolist() == [True, False, False, False, False]
    empty = Scores.plain(torch.zeros(0), {})
    assert empty.drop_groups([]).total.tolist() == []


def test_the_accuracy_is_the_acc_of_a_term_or_else_its_value():
    numbers = {"a/acc": torch.tensor([0.0, 1.0, NAN, NAN, NAN]), "b/f1": torch.ones(5)}
    known = replace(scores(), numbers=numbers)
    names = ["a", "a", "a", "b", "b"]
    assert known.values(names)[[0, 2, 3]].tolist() == [1.0, 0.5, 0.0] and known.values(names)[[1, 4]].isnan().all()
    assert known.accuracies(names)[[0, 2, 3]].tolist() == [0.0, 0.5, 0.0]
    assert known.accuracies(names)[[1, 4]].isnan().all(), "an acc without a value is no score"
    failed = known.drop_failed(["gone", None, None, None, None])
    assert failed.accuracies(names)[0].isnan() and failed.numbers["b/f1"].tolist()[1:] == [1.0] * 4
    assert Scores.plain(torch.zeros(0), {}).accuracies([]).tolist() == []


def test_a_response_needs_another_score():
    dropped = scores().drop_unknown(torch.tensor([0.0, 0.0, NAN, 0.0, 0.0]))
    assert is_scored(dropped.total).tolist() == [True, False, False, True, False]


def test_rows_carry_their_scores_and_the_batch_counts_the_missing_ones_by_reason():
    rows, found = [], scores()
    for number in range(5):
        trajectory = Trajectory([Segment([1, 2], trains=True)], Finish("stop", "x"), {"prompt": "p"})
        row = to_row(trajectory, group=0, unit=number)
        found.add_to(row, number)
        rows.append(row)
    batch = collate(rows)
    assert is_scored(batch["scores"]).tolist() == [True, False, True, True, False]
    assert batch["terms", "b"][:4].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert count_unscored(batch) == {
        "unscored": 2,
        "a/unscored": 1,
        "a/unscored/deadline": 1,
        "b/unscored": 1,
        "b/unscored/ValueError": 1,
    }
    assert count_unscored(batch[[0, 2]]) == {}, "no name without a row"


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("deadline: 3 s", "deadline"),
        ("no answer: http://x", "no_answer"),
        ("ValueError", "ValueError"),
        ("a/b c", "a_b_c"),
    ],
)
def test_a_reason_becomes_a_part_of_a_metrics_name(reason, name):
    assert spell_reason(reason) == name


def test_numbers_for_people_and_for_json():
    assert number_or_none(NAN) is None and number_or_none(0.5) == 0.5
    assert mean_of_scored([1.0, NAN, 0.0]) == 0.5 and math.isnan(mean_of_scored([NAN]))
