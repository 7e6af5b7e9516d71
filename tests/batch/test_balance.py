"""Dealing work to bins, and moving rows between ranks and back."""

import itertools
import random

import pytest
import torch

from rft.batch.balance import Balance, drop_padding, karmarkar_karp, restore_padding, send, work
from rft.batch.collate import collate
from rft.distributed import SINGLE_PROCESS
from rft.metrics import Metrics


def sums(costs, bins):
    return [sum(costs[item] for item in items) for items in bins]


def best(costs, parts):
    """The least that the fullest bin can have."""
    found = []
    for places in itertools.product(range(parts), repeat=len(costs)):
        found.append(max(sum(costs[i] for i, place in enumerate(places) if place == part) for part in range(parts)))
    return min(found)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("seed", range(12))
def test_no_bin_has_much_more_than_it_must(parts, seed):
    """The bounds are those of the differencing method; that of longest processing time first is above them."""
    draw = random.Random(seed)
    costs = [float(draw.choice([draw.randint(1, 9), draw.randint(1, 99)])) for _ in range(draw.randint(1, 7))]
    bins = karmarkar_karp(costs, parts)
    assert sorted(itertools.chain(*bins)) == list(range(len(costs)))
    bound = 7 / 6 if parts == 2 else 4 / 3 - 1 / (3 * (parts - 1))
    assert max(sums(costs, bins)) <= bound * best(costs, parts) + 1e-9


def test_differencing_finds_what_filling_the_emptiest_bin_does_not():
    costs = [8.0, 7.0, 6.0, 5.0, 4.0]
    assert sums(costs, karmarkar_karp(costs, 2)) == [16.0, 14.0], "not 17 and 13"
    many = [float(n * n % 8191) for n in range(512)]
    assert max(sums(many, karmarkar_karp(many, 8))) * 8 / sum(many) < 1.0001


def test_edges_of_dealing():
    assert karmarkar_karp([], 3) == [[], [], []]
    assert karmarkar_karp([5.0], 3) == [[0], [], []]
    assert karmarkar_karp([5.0, 1.0, 2.0], 1) == [[0, 1, 2]]
    assert karmarkar_karp([0.0, 0.0, 0.0], 2) == karmarkar_karp([0.0, 0.0, 0.0], 2)
    assert karmarkar_karp([1.0, 3.0, 2.0], 3) == [[1], [2], [0]], "the fullest first"


@pytest.mark.parametrize("parts", [2, 3])
def test_the_order_of_the_items_plays_no_part(parts):
    costs = [float(c) for c in random.Random(1).sample(range(1, 1000), 40)]
    expected = [{costs[item] for item in items} for items in karmarkar_karp(costs, parts)]
    for seed in range(5):
        moved = random.Random(seed).sample(costs, len(costs))
        assert [{moved[item] for item in items} for items in karmarkar_karp(moved, parts)] == expected


def test_work_is_linear_and_quadratic_in_length():
    assert work(torch.tensor([0, 1, 10, 100_000]), 3.0, 0.5).tolist() == [0.0, 3.5, 80.0, 3e5 + 0.5e10]


def rows_of_all_columns(row_lengths, units, seed=0):
    """Rows of all kinds of columns, with `fields` that stay where they are."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length, unit in zip(row_lengths, units, strict=True):
        ids = torch.randint(1, 2**40, (length,), generator=generator)
        rows.append(
            {
                "tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
                "loss_mask": torch.rand(length, generator=generator) < 0.6,
                "old_logprobs": torch.randn(length, generator=generator),
                "scores": torch.randn((), generator=generator),
                "terms": {"exact": torch.randn((), generator=generator)},
                "unit": unit,
                "group": unit // 10,
                "fields": {"length": length},
            }
        )
    return collate(rows)


def same_rows(one, other):
    """Equal to the bit in every column but `fields`, but for the padding to the right."""
    ours, theirs = (batch.exclude("fields").flatten_keys() for batch in (one, other))
    assert set(ours.keys()) == set(theirs.keys()) and len(one) == len(other)
    for name, column in ours.items():
        expected = theirs[name]
        assert column.dtype == expected.dtype, name
        if column.dim() > 1:
            width = max(column.shape[1], expected.shape[1])
            column, expected = (torch.nn.functional.pad(c, (0, width - c.shape[1])) for c in (column, expected))
        assert torch.equal(column, expected), name


LENGTHS = [9, 2, 7, 1, 4, 12, 3, 5]
UNITS = [40, 11, 40, 7, 7, 30, 11, 2]


def test_rows_are_packed_without_padding():
    batch = rows_of_all_columns(LENGTHS, UNITS).exclude("fields")
    parcel = drop_padding(batch)
    assert {len(column) for column in parcel.tokens.values()} == {sum(LENGTHS)}
    assert {len(column) for column in parcel.rows.values()} == {len(LENGTHS)}
    same_rows(restore_padding([parcel]), batch)
    same_rows(restore_padding([drop_padding(batch[:3]), drop_padding(batch[:0]), drop_padding(batch[3:])]), batch)
    assert restore_padding([drop_padding(batch[:2]), drop_padding(batch[3:5])])["loss_mask"].shape == (4, 9), (
        "as wide as the longest"
    )


def test_no_row_has_every_column():
    batch = rows_of_all_columns(LENGTHS, UNITS)
    empty = restore_padding([drop_padding(batch[:0].exclude("fields"))] * 2)
    assert len(empty) == 0 and empty["tokens", "input_ids"].shape == (0, 1)
    same_rows(empty, batch[:0])


SHARES = {
    "whole units": ([0, 2], [1, 3, 4, 6], [5, 7]),
    "a rank without a row": ([0, 2, 3, 4], [], [1, 5, 6, 7]),
    "all on one": ([0, 1, 2, 3, 4, 5, 6, 7], [], []),
}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_rows_arrive_as_they_were_sent(ranks, shares):
    batch = rows_of_all_columns(LENGTHS, UNITS)
    target = torch.tensor([2, 0, 2, 2, 0, 0, 2, 2])  # no row for rank one

    def work_of(world):
        mine = torch.tensor(shares[world.rank], dtype=torch.int64)
        return send(world, batch[mine], target[mine])

    order = torch.tensor([*itertools.chain(*shares)])
    for rank, found in enumerate(ranks(3, work_of)):
        same_rows(found, batch[order[target[order] == rank]])


def balance(world, together="unit", moves=True):
    return Balance(world, lambda rows: loads(rows), together, moves)


def moved_rows(ranks, batch, shares, **options):
    """The rows of every rank after the balance, and the numbers, which are the same everywhere."""

    def work_of(world):
        metrics = Metrics()
        rows = balance(world, **options).rows(batch[torch.tensor(shares[world.rank], dtype=torch.int64)], metrics)
        return rows, metrics.reduce(world.gather), metrics.reduce(lambda own: [own])

    found = ranks(len(shares), work_of)
    assert all(own == pytest.approx(numbers) and numbers == found[0][1] for _, numbers, own in found)
    return [rows for rows, _, _ in found], found[0][1]


def loads(rows):
    return work(rows["tokens", "attention_mask"].sum(1), 3.0, 0.5)


def load(rows):
    return float(loads(rows).sum())


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_every_rank_gets_its_part_of_the_work_and_whole_units(ranks, shares):
    batch = rows_of_all_columns(LENGTHS, UNITS)
    found, numbers = moved_rows(ranks, batch, shares)
    after = [load(rows) for rows in found]
    before = [load(batch[torch.tensor(share, dtype=torch.int64)]) for share in shares]
    assert numbers["balance/before"] == pytest.approx(max(before) * 3 / sum(before))
    assert numbers["balance/after"] == pytest.approx(max(after) * 3 / sum(after))
    assert numbers["balance/after"] < numbers["balance/before"]
    held = [set(rows["unit"].tolist()) for rows in found]
    assert sum(map(len, held)) == len(set(UNITS)), "none is on two ranks"
    for rows in found:
        inside = torch.isin(batch["unit"], rows["unit"])
        same_rows(rows, batch[inside][batch[inside]["unit"].argsort(stable=True)])


def test_groups_stay_whole_where_they_share_a_prefix(ranks):
    batch = rows_of_all_columns([9, 2, 7, 1, 4, 12, 3, 5], [10, 11, 12, 13, 20, 21, 30, 40])
    shares = ([0, 1, 2, 3, 4, 5], [6, 7])
    found, numbers = moved_rows(ranks, batch, shares, together="group")
    assert [sorted(rows["unit"].tolist()) for rows in found] == [[10, 11, 12, 13, 40], [20, 21, 30]]
    assert 1 < numbers["balance/after"] < numbers["balance/before"]


def test_a_rank_that_gets_no_row_has_every_column(ranks):
    batch = rows_of_all_columns(LENGTHS, UNITS)
    found, _ = moved_rows(ranks, batch, ([1, 4], [], []))
    same_rows(found[2], batch[:0])
    assert [len(rows) for rows in found] == [1, 1, 0]


def test_the_deal_does_not_depend_on_where_the_rows_are(ranks):
    batch = rows_of_all_columns(LENGTHS, UNITS)
    once, _ = moved_rows(ranks, batch, SHARES["whole units"])
    again, _ = moved_rows(ranks, batch, SHARES["a rank without a row"])
    for one, other in zip(once, again, strict=True):
        same_rows(one, other)


def test_rows_that_were_drawn_twice_stay_together(ranks):
    batch = rows_of_all_columns(LENGTHS, range(8))
    shares = ([5, 5, 5, 0], [1, 3])
    found, numbers = moved_rows(ranks, batch, shares)
    assert sorted(unit for rows in found for unit in rows["unit"].tolist()) == [0, 1, 3, 5, 5, 5]
    assert {5} in [set(rows["unit"].tolist()) for rows in found]
    assert numbers["balance/after"] < numbers["balance/before"]


def test_where_nothing_is_gained_the_rows_stay(ranks):
    equal = rows_of_all_columns([6] * 8, range(8))
    halves = ([0, 1, 2, 3], [4, 5, 6, 7])
    found, numbers = moved_rows(ranks, equal, halves)
    assert [rows["fields"].tolist() for rows in found] == [[{"length": 6}] * 4] * 2, "not even copied"
    assert numbers == {"balance/before": 1.0, "balance/after": 1.0}
    skewed = rows_of_all_columns(LENGTHS, UNITS)
    found, numbers = moved_rows(ranks, skewed, SHARES["all on one"], moves=False)
    assert [len(rows) for rows in found] == [8, 0, 0] and numbers == {"balance/before": 3.0, "balance/after": 3.0}


@pytest.mark.parametrize("shares", [([],), ([], [])])
def test_a_mini_batch_without_rows(ranks, shares):
    found, numbers = moved_rows(ranks, rows_of_all_columns(LENGTHS, UNITS), shares)
    assert [len(rows) for rows in found] == [0] * len(shares)
    assert numbers == {"balance/before": 1.0, "balance/after": 1.0}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_columns_come_home_from_where_they_were_computed(ranks, shares):
    batch = rows_of_all_columns(LENGTHS, UNITS)

    def say(rows):
        real = rows["tokens", "attention_mask"].bool()
        sums = torch.where(real, rows["old_logprobs"] + rows["scores"][:, None], 0.0)
        several = rows["tokens", "input_ids"][..., None].int() * torch.tensor([1, 2, 3]) * real[..., None]
        return {"sum": sums, "kept": rows["loss_mask"] & real, "several": several.int()}

    def work_of(world):
        mine = batch[torch.tensor(shares[world.rank], dtype=torch.int64)]
        moved = (mover := balance(world)).move(mine)
        return mover.restore(say(moved.rows), mine, moved), load(moved.rows)

    found = ranks(3, work_of)
    after = [seen for _, seen in found]
    before = [load(batch[torch.tensor(share, dtype=torch.int64)]) for share in shares]
    assert max(after) < max(before) and sum(after) == sum(before)
    for share, (columns, _) in zip(shares, found, strict=True):
        mine = batch[torch.tensor(share, dtype=torch.int64)]
        for name, column in say(mine).items():
            assert torch.equal(columns[name], column) and columns[name].dtype == column.dtype, name


def test_one_rank_computes_its_own(ranks):
    batch = rows_of_all_columns(LENGTHS, UNITS)
    [moved] = ranks(1, lambda world: balance(world).move(batch))
    columns = {"scores": batch["scores"]}
    assert moved.rows is batch and balance(SINGLE_PROCESS).restore(columns, batch, moved) is columns
