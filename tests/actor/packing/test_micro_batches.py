"""Cutting rows into forwards: every row once, a hard cap, units whole, few and even, as many on all ranks."""

import copy
from itertools import chain

import pytest
import torch

from rft.actor.packing.layout import pack_layout, shared_prefixes
from rft.actor.packing.micro_batches import MicroBatcher, cut_packed, cut_padded, largest_unit
from rft.batch.collate import trim
from rft.batch.columns import lengths
from rft.distributed import start
from tests.helpers import token_batch

LENGTHS = [7, 1, 12, 3, 3, 9, 2, 12, 5, 1, 4]


def lengths_batch(row_lengths, unit=None, group=None, prompt=0):
    """Rows of these lengths; those of a group begin with the same `prompt` tokens and are then like no other."""
    unit = range(len(row_lengths)) if unit is None else unit
    group = range(len(row_lengths)) if group is None else group
    rows = [1000 * (number + 1) + torch.arange(length) for number, length in enumerate(row_lengths)]
    for ids, g in zip(rows, group, strict=True):
        ids[:prompt] = 10 + g
    trains = [torch.arange(length) > 0 for length in row_lengths]
    return token_batch(*rows, response_mask=trains, loss_mask=trains, unit=unit, group=group)


def nothing_shared(batch):
    return torch.zeros(len(batch), dtype=torch.int64)


def packed(batch, cap, shared=None, more=0):
    return cut_packed(batch, nothing_shared(batch) if shared is None else shared, cap, lambda count: count + more)


def computed(batch, shared, cuts):
    """Tokens of every forward."""
    chosen = [torch.tensor(rows, dtype=torch.int64) for rows in cuts]
    return [len(pack_layout(trim(batch[rows]), shared[rows]).source) if len(rows) else 0 for rows in chosen]


@pytest.mark.parametrize("cap", [12, 13, 24, 25, 40, 1000])
@pytest.mark.parametrize("shuffle", [0, 1])
def test_padded_rows_of_like_lengths_go_together_under_the_cap(cap, shuffle):
    order = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(shuffle))
    row_lengths = [LENGTHS[i] for i in order]
    cuts = cut_padded(lengths_batch(row_lengths), cap)
    assert sorted(chain(*cuts)) == list(range(len(LENGTHS)))
    sizes = [[row_lengths[row] for row in rows] for rows in cuts]
    assert all(len(found) * max(found) <= cap for found in sizes)
    flat = [length for found in sizes for length in found]
    assert flat == sorted(LENGTHS, reverse=True), "like lengths go together, the longest first"
    for left in sizes[:-1]:
        assert (len(left) + 1) * max(left) > cap, "a row is put where it still fits"


def test_padded_units_stay_together():
    unit = [5, 3, 5, 3, 9, 9, 9, 5]
    row_lengths = [2, 8, 3, 1, 4, 4, 2, 1]
    cuts = cut_padded(lengths_batch(row_lengths, unit), 16)
    assert [sorted(rows) for rows in cuts] == [[1, 3], [4, 5, 6], [0, 2, 7]]
    cuts = cut_padded(lengths_batch(row_lengths, unit), 24)
    assert [sorted(rows) for rows in cuts] == [[1, 3], [0, 2, 4, 5, 6, 7]]


def first_fit(sizes, cap):
    """How many bins the largest first, each into the first bin that takes it, come to."""
    bins = []
    for size in sorted(sizes, reverse=True):
        at = next((number for number, full in enumerate(bins) if full + size <= cap), None)
        if at is None:
            bins.append(size)
        else:
            bins[at] += size
    return len(bins)


def random_rows(seed):
    """A batch of long and short rows in units and groups, its cap, and how many micro-batches others have more."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, size=()):
        return torch.randint(low, high, size, generator=generator)

    count = int(draw(1, 40))
    row_lengths = (1 + 60 * torch.rand(count, generator=generator).pow(3)).long().tolist()
    group = draw(0, max(count // 5, 1), (count,)).tolist()
    unit = [(list(range(count)), group, draw(0, count, (count,)).tolist())[seed % 3][row] for row in range(count)]
    batch = lengths_batch(row_lengths, unit, group, prompt=int(draw(0, 12)))
    shared = shared_prefixes(batch) if seed % 2 else nothing_shared(batch)
    largest = largest_unit(batch, shared, packing=True)
    return batch, shared, largest + int(draw(0, largest + 1)), int(draw(0, 3))


@pytest.mark.parametrize("seed", range(120))
def test_packed_rows_are_dealt_once_and_under_the_cap(seed):
    batch, shared, cap, more = random_rows(seed)
    cuts = packed(batch, cap, shared, more)
    assert sorted(chain(*cuts)) == list(range(len(batch)))
    assert max(computed(batch, shared, cuts)) <= cap
    of_unit = [{batch["unit"][row].item() for row in rows} for rows in cuts]
    assert sum(len(units) for units in of_unit) == len(batch["unit"].unique()), "a unit is whole"
    if not shared.any():
        sizes = [int(lengths(batch)[batch["unit"] == unit].sum()) for unit in batch["unit"].unique()]
        assert len(cuts) == first_fit(sizes, cap) + more


def test_micro_batches_are_even():
    row_lengths = (2 + 500 * torch.rand(200, generator=torch.Generator().manual_seed(1)).pow(4)).long().tolist()
    cuts = packed(lengths_batch(row_lengths), 2048)
    sums = [sum(row_lengths[row] for row in rows) for rows in cuts]
    assert len(sums) == -(-sum(row_lengths) // 2048) > 5, "no more than the cap asks for"
    assert sums == sorted(sums, reverse=True)
    assert max(sums) * len(sums) / sum(sums) < 1.01


def test_where_others_have_more_the_rows_are_spread_over_as_many():
    batch = lengths_batch([5, 5, 4, 4, 3, 3])
    assert packed(batch, 100) == [[0, 1, 2, 3, 4, 5]]
    assert [int(lengths(batch)[rows].sum()) for rows in packed(batch, 100, more=2)] == [8, 8, 8]
    assert sorted(map(len, packed(batch, 100, more=7))) == [0, 0, 1, 1, 1, 1, 1, 1]
    assert packed(batch[:0], 100, more=2) == [[], []]


def test_where_an_even_deal_passes_the_cap_the_first_fit_stays():
    """8 7 6 5 4: differences of the largest end at 16 and 14, although 15 and 15 is possible."""
    batch = lengths_batch([8, 7, 6, 5, 4])
    assert packed(batch, 15) == [[0, 1], [2, 3, 4]]
    assert [int(lengths(batch)[rows].sum()) for rows in packed(batch, 16)] == [16, 14]


def test_a_group_takes_its_beginning_along_once():
    batch = lengths_batch([12] * 4, group=[0] * 4, prompt=10)
    shared = shared_prefixes(batch)
    assert shared.tolist() == [10] * 4
    assert packed(batch, 18, shared) == [[0, 1, 2, 3]]
    halves = packed(batch, 17, shared)
    assert sorted(chain(*halves)) == [0, 1, 2, 3] and sorted(computed(batch, shared, halves)) == [12, 16]
    assert len(packed(batch, 17)) == 4, "17 tokens take one of these rows where nothing is shared"


def test_rows_of_a_group_go_together_where_that_saves_tokens():
    batch = lengths_batch([12, 30, 12, 20, 12, 12], group=[0, 1, 0, 2, 3, 0], prompt=10)
    shared = shared_prefixes(batch)
    cuts = packed(batch, 46, shared)
    assert [0, 2, 5] in [[row for row in rows if row in (0, 2, 5)] for rows in cuts]
    assert sum(computed(batch, shared, cuts)) == 30 + 20 + 12 + (10 + 3 * 2)


@pytest.mark.parametrize("group", [[0, 0, 0], [0, 0, 1], [0, 1, 2]])
def test_the_largest_unit_is_what_a_forward_of_it_computes(group):
    batch = lengths_batch([5, 9, 7, 3], [4, 4, 4, 8], [*group, 9], prompt=4)
    shared = shared_prefixes(batch)
    assert largest_unit(batch, shared, packing=True) == computed(batch, shared, [[0, 1, 2]])[0]
    assert largest_unit(batch, nothing_shared(batch), packing=True) == 21
    assert largest_unit(batch, shared, packing=False) == 27
    assert largest_unit(batch[:0], shared[:0], packing=True) == largest_unit(batch[:0], shared[:0], packing=False) == 0


def micro_batches(batch, options, counts=(), dummy=None):
    """Those of a rank, where others need as many as `counts` say."""
    world = copy.copy(start("cpu"))
    calls = []
    world.gather = lambda thing: calls.append(thing) or [thing, *((count, 0) for count in counts)]
    found = list(MicroBatcher(*options).micro_batches(batch, batch[:1] if dummy is None else dummy, world, None))
    assert len(calls) == 1, "ranks wait for each other once"
    return found


@pytest.mark.parametrize("packing", [False, True])
def test_a_micro_batch_is_as_wide_as_its_longest_row(packing):
    batch = lengths_batch(LENGTHS)
    found = micro_batches(batch, (13, packing, False))
    assert sorted(torch.cat([micro.rows for micro in found]).tolist()) == list(range(len(LENGTHS)))
    for micro in found:
        own = [LENGTHS[row] for row in micro.rows]
        assert micro.batch["loss_mask"].shape == (len(own), max(own))
        assert torch.equal(lengths(micro.batch), torch.tensor(own))
        assert micro.computed == (sum(own) if packing else len(own) * max(own)) <= 13
        assert (micro.layout is not None) is packing
        assert micro.layout is None or len(micro.layout.source) == micro.computed
    assert [micro.last for micro in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize("packing", [False, True])
def test_a_rank_with_nothing_left_computes_one_token_that_does_not_train(packing):
    batch = lengths_batch([6, 8])
    batch["loss_mask"][:] = True
    before = batch.clone()
    found = micro_batches(batch[:0], (20, packing, False), counts=(2,), dummy=batch[1:])
    assert [len(micro.rows) for micro in found] == [0, 0]
    for micro in found:
        assert micro.computed == 1 and micro.batch["tokens", "input_ids"].tolist() == [[2000]]
        assert micro.batch["tokens", "attention_mask"].tolist() == [[1]] and not micro.batch["loss_mask"].any()
    assert [micro.last for micro in found] == [False, True]
    assert (batch == before).all(), "the row that is lent stays as it is"


@pytest.mark.parametrize(
    ("packing", "row_lengths", "unit", "needed"),
    [
        (False, [3, 17], [0, 1], 17),
        (False, [3, 6, 1], [4, 4, 4], 18),
        (True, [3, 17], [0, 1], 17),
        (True, [3, 13, 1], [4, 4, 4], 17),
    ],
)
def test_a_unit_over_the_cap_says_what_would_do(packing, row_lengths, unit, needed):
    batch = lengths_batch(row_lengths, unit)
    for cap in (16, needed - 1):
        with pytest.raises(ValueError, match=rf"^actor\.micro_batch_tokens={cap}: .* {needed} tokens; .* {needed}$"):
            micro_batches(batch, (cap, packing, False))
    micro_batches(batch, (needed, packing, False))


def test_a_unit_over_the_cap_of_another_rank_is_an_error_here_too(ranks):
    """Otherwise this one would wait for it for ever."""

    def work(world):
        row = lengths_batch([30 if world.rank == 1 else 3])
        with pytest.raises(ValueError, match=r"^actor\.micro_batch_tokens=20: .* to at least 30$"):
            next(MicroBatcher(20, True, False).micro_batches(row, row, world, None))
        return True

    assert ranks(2, work) == [True, True]


def test_every_rank_makes_as_many_as_the_one_that_needs_most(ranks):
    def work(world):
        batch = lengths_batch([9] * (1 + 4 * world.rank))
        return cut_packed(batch, nothing_shared(batch), 20, lambda count: max(world.gather(count)))

    few, many = ranks(2, work)
    assert [len(rows) for rows in few] == [1, 0, 0] and sorted(len(rows) for rows in many) == [1, 2, 2]
