"""Where the tokens of rows lie in one packed sequence, by hand."""

import pytest
import torch

from rft.actor.packing import layout as module
from rft.actor.packing.layout import PackedSegment, pack_layout, shared_prefixes, table_segments
from tests.helpers import MODEL, make_actor, make_batch, make_strategy, token_batch


def of_layout(batch, shared):
    layout = pack_layout(batch, torch.tensor(shared))
    return {name: vars(layout)[name].tolist() for name in ("source", "positions", "place")}, layout.segments


def tokens(batch, layout):
    """What every row reads at its places, padding left out."""
    sequence = batch["tokens", "input_ids"].flatten()[layout.source]
    real = batch["tokens", "attention_mask"].bool()
    return [sequence[place[mask]].tolist() for place, mask in zip(layout.place, real, strict=True)]


def test_rows_lie_behind_one_another_those_of_one_length_together():
    batch = token_batch([7, 8, 9], [5, 6], [1, 2, 3, 4], [3, 4])
    found, segments = of_layout(batch, [0, 0, 0, 0])
    assert segments == (PackedSegment(2, 2), PackedSegment(1, 3), PackedSegment(1, 4))
    assert found["source"] == [4, 5, 12, 13, 0, 1, 2, 8, 9, 10, 11]  # rows of four places
    assert found["positions"] == [0, 1, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    assert found["place"] == [[4, 5, 6, 0], [0, 1, 0, 0], [7, 8, 9, 10], [2, 3, 0, 0]]


def test_what_rows_of_a_group_share_lies_there_once():
    batch = token_batch([5, 6, 1], [9], [5, 6, 2, 3], [5, 6, 4], [7, 7, 8], [7, 7, 9], group=[4, 2, 4, 4, 3, 3])
    found, segments = of_layout(batch, [2, 0, 2, 2, 1, 1])
    assert segments == (
        PackedSegment(1, 1),  # the row alone
        PackedSegment(1, 2),  # what group 4 begins with
        PackedSegment(2, 1, 1),
        PackedSegment(1, 2, 1),
        PackedSegment(1, 1),  # what group 3 begins with
        PackedSegment(2, 2, 4),
    )
    assert found["source"] == [4, 0, 1, 2, 14, 10, 11, 16, 17, 18, 21, 22]
    assert found["positions"] == [0, 0, 1, 2, 2, 2, 3, 0, 1, 2, 1, 2]
    assert found["place"] == [
        [1, 2, 3, 0],
        [0, 0, 0, 0],
        [1, 2, 5, 6],
        [1, 2, 4, 0],
        [7, 8, 9, 0],
        [7, 10, 11, 0],
    ]


def test_a_row_that_has_nobody_of_its_group_here_lies_whole():
    _, segments = of_layout(token_batch([5, 6, 1], [5, 6, 2], [8, 9, 9], group=[0, 0, 1]), [2, 2, 2])
    assert segments == (PackedSegment(1, 3), PackedSegment(1, 2), PackedSegment(2, 1, 1))
    _, segments = of_layout(token_batch([5, 6, 1], [8, 9, 9], group=[0, 1]), [2, 2])
    assert segments == (PackedSegment(2, 3),)


@pytest.mark.parametrize("shares", [False, True])
def test_every_token_of_every_row_is_at_its_place(shares):
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        lengths = torch.randint(1, 9, (7,), generator=generator).tolist()
        rows = [torch.randint(1, 3, (length,), generator=generator).tolist() for length in lengths]
        batch = token_batch(*rows, group=torch.randint(0, 3, (7,), generator=generator).tolist())
        shared = shared_prefixes(batch) if shares else torch.zeros(7, dtype=torch.int64)
        layout = pack_layout(batch, shared)
        assert tokens(batch, layout) == rows
        positions = layout.positions[layout.place]
        assert all(positions[row, :length].tolist() == list(range(length)) for row, length in enumerate(lengths))
        here = batch["group"].unique()
        again = sum(int(shared[batch["group"] == g][1:].sum()) for g in here)
        assert len(layout.source) == sum(lengths) - again == sum(s.rows * s.length for s in layout.segments)


@pytest.mark.parametrize(
    ("rows", "group", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4, 5], [1, 2, 3, 6]], [0, 0, 0], [2, 2, 2]),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 2, 3]], [0, 1, 1, 0], [2, 2, 2, 2]),
        ([[1, 2, 3], [1, 2, 3, 4]], [5, 6], [0, 0]),  # groups of one
        ([[1, 2, 3], [1, 2, 3]], [0, 0], [2, 2]),  # equal rows keep a token each
        ([[1, 2, 3, 4], [1, 2], [1, 2, 3, 5]], [0, 0, 0], [1, 1, 1]),  # a row that others go on from does too
        ([[1], [1, 2]], [0, 0], [0, 0]),
        ([[1, 2, 3], [4, 2, 3]], [0, 0], [0, 0]),  # equal again further on is no beginning
        ([[1, 2, 3, 4], [1, 5, 3, 6]], [0, 0], [1, 1]),
    ],
)
def test_what_groups_begin_with(rows, group, expected):
    assert shared_prefixes(token_batch(*rows, group=group)).tolist() == expected


def kinds(rows):
    """A second column of tokens."""
    return [{"kind": torch.tensor(row)} for row in rows]


def test_tokens_are_shared_where_all_their_columns_are_equal():
    rows, group = [[1, 2, 3, 4], [1, 2, 3, 5]], [0, 0]
    assert shared_prefixes(token_batch(*rows, group=group, tokens=kinds([[0, 0, 0, 1], [0, 0, 0, 1]]))).tolist() == [
        3,
        3,
    ]
    assert shared_prefixes(token_batch(*rows, group=group, tokens=kinds([[0, 0, 1, 1], [0, 0, 0, 1]]))).tolist() == [
        2,
        2,
    ]


def test_a_batch_without_rows_shares_nothing():
    assert shared_prefixes(token_batch([1, 2])[:0]).tolist() == []


def test_the_table_of_a_layout_holds_its_segments():
    layout = pack_layout(token_batch([5, 6, 1], [9], [5, 6, 2, 3], group=[4, 2, 4]), torch.tensor([2, 0, 2]))
    assert layout.table.tolist() == [1, 1, -1, 1, 2, -1, 1, 1, 1, 1, 2, 1]
    assert table_segments(layout.table) == layout.segments


@pytest.mark.parametrize("layers", [1, 3])
def test_fsdp_does_not_copy_the_layout_before_a_block(world, monkeypatch, layers):
    """It casts what a block gets, and copies dataclasses for that, field by field."""
    shape = {"model_config": MODEL | {"num_hidden_layers": layers}}
    actor, made = make_actor(world, make_strategy(world, dtype="bfloat16"), **shape), []
    monkeypatch.setattr(module, "segment_table", lambda segments: made.append(segments) or torch.empty(0))
    actor.compute(make_batch(), ("logprobs",), 1.0)
    assert len(made) == 2, "once when rows are packed, and once on their way to the device"
