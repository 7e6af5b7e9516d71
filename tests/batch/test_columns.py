"""Padding, trimming, and cutting a batch into mini-batches."""

import pytest
import torch
from tensordict import TensorDict

from rft.batch.collate import collate, mini_batches, trim
from rft.batch.columns import check_columns, chosen_places, fields, lengths, rows_and_columns


def row(length, **more):
    ids = torch.arange(1, length + 1)
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {"tokens": tokens, "response_mask": ids > 1, "unit": 0, "fields": {"length": length}} | more


def test_collate_pads_on_the_right_with_zeros():
    logprobs = [torch.tensor([0.0, -0.5]), torch.tensor([0.0, -1.0, -2.0])]
    batch = collate(
        [
            row(2, rollout_logprobs=logprobs[0], truncated=True, group=7, version=torch.tensor([0, 1])),
            row(3, rollout_logprobs=logprobs[1], truncated=False, group=8, version=torch.tensor([0, 2, 2])),
        ]
    )
    assert batch.batch_size == torch.Size([2])
    assert batch["tokens", "input_ids"].tolist() == [[1, 2, 0], [1, 2, 3]]
    assert batch["tokens", "attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["response_mask"].tolist() == [[False, True, False], [False, True, True]]
    assert batch["rollout_logprobs"].tolist() == [[0.0, -0.5, 0.0], [0.0, -1.0, -2.0]]
    dtypes = {"response_mask": torch.bool, "truncated": torch.bool, "group": torch.int64, "version": torch.int64}
    assert {name: batch[name].dtype for name in dtypes} == dtypes
    assert batch["rollout_logprobs"].dtype == torch.float32
    assert (batch["group"].tolist(), batch["truncated"].tolist()) == ([7, 8], [True, False])
    assert lengths(batch).tolist() == [2, 3]


def test_fields_stay_plain_and_follow_their_rows():
    nested = [{"text": "a", "turns": [1, {"x": None}]}, {"text": "b", "turns": []}, {"text": "c", "other": 3}]
    batch = collate([row(2, fields=given) for given in nested])
    assert fields(batch) == nested
    assert fields(batch[torch.tensor([2, 0])]) == [nested[2], nested[0]]
    assert fields(batch[torch.tensor([False, True, False])]) == [nested[1]]
    assert fields(batch[:1]) == nested[:1]
    assert fields(trim(batch)) == nested


def test_trim_cuts_what_no_row_needs():
    batch = collate([row(2), row(5), row(3)])
    batch["loss_mask"] = batch["response_mask"].clone()
    batch["scores"] = torch.tensor([1.0, 2.0, 3.0])
    batch["terms"] = TensorDict({"exact": torch.ones(3)}, batch_size=[3])
    part = trim(batch[torch.tensor([2, 0])])
    assert part["tokens", "input_ids"].tolist() == [[1, 2, 3], [1, 2, 0]]
    assert part["loss_mask"].tolist() == [[False, True, True], [False, True, False]]
    assert part["scores"].tolist() == [3.0, 1.0]
    assert part["terms", "exact"].shape == (2,)
    assert fields(part) == [{"length": 3}, {"length": 2}]
    assert batch["loss_mask"].shape == (3, 5), "the batch that is trimmed stays as it is"
    assert trim(batch) is batch


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_mini_batches_deal_every_unit_once(count):
    unit = torch.tensor([4, 4, 9, 2, 2, 2, 7, 11])
    parts = list(mini_batches(unit, count, seed=3))
    assert len(parts) == count
    assert sorted(torch.cat(parts).tolist()) == [2, 4, 7, 9, 11]
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_mini_batches_do_not_depend_on_where_rows_are():
    unit = torch.arange(40).repeat(2)
    moved = unit[torch.randperm(80, generator=torch.Generator().manual_seed(1))]
    once = [part.tolist() for part in mini_batches(unit, 4, seed=5)]
    assert [part.tolist() for part in mini_batches(moved, 4, seed=5)] == once
    assert [part.tolist() for part in mini_batches(unit, 4, seed=6)] != once
    assert once[0] != list(range(10)), "they are dealt at random"


def test_columns_flow():
    check_columns(
        [("source", (), ("tokens",)), ("critic", ("tokens",), ("values",)), ("loss", ("values", "tokens"), ())]
    )


def test_a_column_that_nothing_writes():
    stages = [("algorithm.source", (), ("tokens", "loss_mask")), ("algorithm.loss", ("loss_mask", "values"), ())]
    with pytest.raises(
        ValueError,
        match=r"^algorithm\.loss reads the column 'values', which nothing before it writes "
        r"\(there are: loss_mask, tokens\); choose another algorithm\.loss or add what writes 'values'$",
    ):
        check_columns(stages)


def test_a_column_that_is_written_too_late():
    with pytest.raises(ValueError, match=r"^b reads the column 'x', which nothing before it"):
        check_columns([("a", (), ()), ("b", ("x",), ()), ("c", (), ("x",))])


def test_a_column_with_two_writers():
    stages = [("algorithm.source", (), ("values",)), ("critic", (), ("values",))]
    with pytest.raises(
        ValueError, match=r"^critic writes the column 'values', which algorithm\.source already writes$"
    ):
        check_columns(stages)


def test_chosen_places_are_rows_and_columns():
    select = torch.tensor([[True, False, True], [False, True, True]])  # the first column predicts nothing
    rows, columns = rows_and_columns(chosen_places(select), select.shape)
    assert (rows.tolist(), columns.tolist()) == ([0, 1, 1], [2, 1, 2])
    alone = torch.ones(2, 1, dtype=torch.bool)
    assert all(len(places) == 0 for places in rows_and_columns(chosen_places(alone), alone.shape))
