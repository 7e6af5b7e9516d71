"""Media follow their rows: through padding, trimming, mini-batches, ranks, micro-batches and checkpoints."""

import copy
import json
import pickle
from itertools import chain
from pathlib import Path

import pytest
import torch
from tensordict import LazyStackedTensorDict

from rft.actor.packing.layout import shared_prefixes
from rft.actor.packing.micro_batches import MicroBatcher, first_token
from rft.batch.balance import Balance, drop_padding, restore_padding, send, work
from rft.batch.collate import collate, dummy_row, mini_batches, trim
from rft.batch.columns import kind_of
from rft.batch.media import concat_media, has_media, keep_once, media_entries, share_again, share_media, stack_media
from rft.distributed import start
from rft.metrics import Metrics
from rft.train.checkpoint.tree import join, split


def picture(number, patches):
    """What a processor may return for one or several images: a row a patch, or a row an image."""
    generator = torch.Generator().manual_seed(number)
    sizes = torch.tensor([[1, 1, count] for count in patches])
    return {"pixels": torch.randn(sum(patches), 3, generator=generator), "grid": sizes}


def sound(number, width=6):
    """Features of one clip, and a mask that is as wide as a row has tokens."""
    generator = torch.Generator().manual_seed(number)
    return {"features": torch.randn(1, 2, width, generator=generator), "mask": torch.ones(1, width, dtype=torch.bool)}


MEDIA = [picture(0, [2]), None, picture(1, [3, 5]), sound(2), None, picture(3, [1, 1, 4]) | sound(4), None, {}]
LENGTHS = [6, 2, 9, 6, 1, 12, 3, 4]
UNITS = [40, 11, 40, 7, 7, 30, 11, 2]


def rows_of(media=MEDIA, lengths=LENGTHS, units=UNITS):
    """Rows with every new column; the scores tell them apart."""
    rows = []
    for number, (length, unit, entry) in enumerate(zip(lengths, units, media, strict=True)):
        ids = 100 * (number + 1) + torch.arange(length)
        rows.append(
            {
                "tokens": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
                "response_mask": torch.arange(length) > 0,
                "loss_mask": torch.arange(length) > 0,
                "turn": torch.arange(length) // 2,
                "trajectory": unit // 2,
                "unit": unit,
                "group": unit // 10,
                "scores": torch.tensor(float(number)),
                "media": entry,
                "fields": {"number": number},
            }
        )
    return rows


def same_media(batch, media=MEDIA):
    """Every row of the batch has its own media, to the bit; rows are known by their scores."""
    entries = media_entries(batch) or [{}] * len(batch)
    for score, entry in zip(batch["scores"].tolist(), entries, strict=True):
        expected = media[int(score)] or {}
        assert set(entry.keys()) == set(expected)
        for name, tensor in expected.items():
            assert entry[name].dtype == tensor.dtype and torch.equal(entry[name], tensor), name


def test_rows_keep_their_media_as_they_are():
    batch = collate(rows_of())
    assert isinstance(batch.get("media"), LazyStackedTensorDict) and batch.get("media").batch_size == torch.Size([8])
    same_media(batch)
    assert media_entries(batch)[0]["pixels"].data_ptr() == MEDIA[0]["pixels"].data_ptr(), "not copied"
    for rows in (torch.tensor([5, 0, 0, 3]), torch.arange(8) % 2 == 0, slice(2, 4), torch.tensor([1, 4])):
        same_media(batch[rows])
    assert media_entries(batch[:0]) == [] and not has_media(batch[:0])
    assert media_entries(batch[torch.zeros(8, dtype=torch.bool)]) == []


def test_a_batch_without_media_has_no_column():
    for media in ([None] * 3, [{}, None, {}]):
        batch = collate(rows_of(media, [3, 1, 2], [0, 1, 2]))
        assert "media" not in batch.keys() and media_entries(batch) == [] and share_media(batch) is None
    rows = rows_of([None] * 3, [3, 1, 2], [0, 1, 2])
    for row in rows:
        del row["media"]
    assert "media" not in collate(rows).keys()
    rows[2]["media"] = MEDIA[0]
    assert [len(entry.keys()) for entry in media_entries(collate(rows))] == [0, 0, 2], "whatever the first row has"


def test_rows_of_a_group_share_their_media():
    media = [MEDIA[0]] * 3 + [MEDIA[2]] * 2
    entries = media_entries(collate(rows_of(media, [3] * 5, range(5)))[torch.tensor([4, 0, 2, 3])])
    assert entries[1] is entries[2] and entries[0] is entries[3] and entries[0] is not entries[1]


def test_media_are_not_cut_where_they_are_as_wide_as_the_tokens():
    rows = rows_of([sound(0, 3000), None], [3000, 4], [0, 1])
    batch = collate(rows)
    assert batch["tokens", "input_ids"].shape == (2, 3000)
    batch["other"] = torch.ones(2, 3000, 2)  # a plugin's
    part = trim(batch[torch.tensor([1, 1])])
    assert part["tokens", "input_ids"].shape == part["turn"].shape == (2, 4) and part["other"].shape == (2, 4, 2)
    short = rows_of([sound(0, 3000), None], [7, 4], [0, 1])
    for row in short:  # padding that no row needs
        row["tokens"]["attention_mask"][4:] = 0
    [entry, _] = media_entries(trim(collate(short)))
    assert entry["features"].shape == (1, 2, 3000) and entry["mask"].shape == (1, 3000)


def test_new_columns_are_padded_by_their_kind():
    batch = collate(rows_of())
    assert batch["turn"].shape == (8, 12) and batch["trajectory"].tolist() == [20, 5, 20, 3, 3, 15, 5, 1]
    assert batch["turn"][0].tolist() == [0, 0, 1, 1, 2, 2] + [0] * 6
    assert trim(batch[:2])["turn"].shape == (2, 6)


def test_kinds_are_those_of_the_table_and_a_plugins_column_is_known_by_its_dimensions():
    assert kind_of("scores", 2) == "row" and kind_of("loss_mask", 1) == "token", "the table, whatever the shape"
    assert kind_of("media", 2) == "media" and kind_of("fields", 1) == "fields"
    assert [kind_of("a_plugin's", dims) for dims in (1, 2, 3)] == ["row", "token", "token"]
    [plain] = collate([row | {"bonus": 2.5, "hints": torch.ones(6)} for row in rows_of()[:1]])
    assert plain["bonus"].shape == () and plain["hints"].shape == (6,)


def test_media_are_concatenated_over_the_rows_that_have_them():
    entries = media_entries(collate(rows_of()))
    found = concat_media(entries)
    assert set(found) == {"pixels", "grid", "features", "mask"}
    assert torch.equal(found["pixels"], torch.cat([MEDIA[row]["pixels"] for row in (0, 2, 5)]))
    assert found["grid"].tolist() == [[1, 1, patches] for patches in (2, 3, 5, 1, 1, 4)]
    assert torch.equal(found["features"], torch.cat([MEDIA[3]["features"], MEDIA[5]["features"]]))
    assert concat_media([]) == {} == concat_media(entries[1:2])
    with pytest.raises(ValueError, match=r"media 'features' of the shapes \(n, \.\.\.\) .*\[\(2, 5\), \(2, 6\)\]"):
        concat_media(media_entries(collate(rows_of([sound(0), sound(1, 5)], [2, 2], [0, 1]))))
    with pytest.raises(AssertionError, match="0-D"):
        stack_media([{"scale": torch.tensor(1.0)}])


def test_what_travels_has_every_entry_once_and_no_more_than_its_own_storage():
    large = torch.zeros(1000, 1000)
    media = [{"pixels": large[:2]}] * 2 + [None] + [{"pixels": large[2:4]}]
    batch = collate(rows_of(media, [3] * 4, range(4)))
    shared = share_media(batch[torch.tensor([1, 3, 2, 0])])
    assert shared.rows == [0, 1, -1, 0] and len(shared.entries) == 2
    assert len(pickle.dumps(drop_padding(batch))) < 50_000, "not the million of which they are views"
    same_media(restore_padding([drop_padding(batch[:2]), drop_padding(batch[2:3]), drop_padding(batch[3:])]), media)
    again = media_entries(restore_padding([drop_padding(batch)]))
    assert again[0] is again[1] and again[0] is not again[3]


SHARES = {
    "mixed": ([0, 2, 7], [1, 3, 4, 5, 6]),
    "media on one rank alone": ([0, 2, 3, 5, 7], [1, 4, 6]),
    "a rank without a row": (list(range(8)), []),
}


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_media_arrive_with_their_rows(ranks, shares):
    batch, target = collate(rows_of()), torch.tensor([1, 0, 1, 0, 0, 1, 0, 1])
    parts = [batch[torch.tensor(share, dtype=torch.int64)] for share in shares]
    found = ranks(2, lambda world: send(world, parts[world.rank], target[torch.tensor(shares[world.rank]).long()]))
    for rank, rows in enumerate(found):
        assert rows["scores"].tolist() == [row for row in chain(*shares) if target[row] == rank]
        same_media(rows)
        assert {"turn", "trajectory"} <= set(rows.keys())
    assert "media" in found[0].keys(), "the clip of row 3"


def loads(rows):
    return work(rows["tokens", "attention_mask"].sum(1), 3.0, 0.5)


@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_media_follow_their_rows_through_the_balance(ranks, shares):
    batch = collate(rows_of())

    def compute(rows):
        """A column that depends on the media of a row alone."""
        entries = media_entries(rows) or [{}] * len(rows)
        sums = torch.tensor([sum((float(tensor.sum()) for tensor in entry.values()), 0.0) for entry in entries])
        return {"media_sum": sums[:, None] * rows["tokens", "attention_mask"]}

    def work_of(world):
        own = batch[torch.tensor(shares[world.rank], dtype=torch.int64)]
        balance = Balance(world, loads, "unit", True)
        moved = balance.move(own)
        return balance.rows(own, Metrics()), balance.restore(compute(moved.rows), own, moved), compute(own)

    found = ranks(2, work_of)
    assert sorted(score for rows, *_ in found for score in rows["scores"].tolist()) == list(range(8))
    for rows, balanced, alone in found:
        same_media(rows)
        assert torch.equal(balanced["media_sum"], alone["media_sum"])


@pytest.mark.slow
def test_two_processes_exchange_media(torchrun, tmp_path):
    torchrun(Path(__file__).parent / "media_on_ranks.py", tmp_path)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert sorted(found["scores"].tolist()) == ([1, 3, 5, 7] if rank else [0, 2, 4, 6])
        same_media(found)


def test_mini_batches_take_the_media_along():
    batch = collate(rows_of())
    parts = [batch[torch.isin(batch["unit"], units)] for units in mini_batches(batch["unit"], 3, seed=1)]
    assert sum(map(len, parts)) == 8
    for part in parts:
        same_media(part)


@pytest.mark.parametrize("packing", [False, True])
def test_a_micro_batch_offers_the_media_of_its_rows_in_the_order_of_the_forward(packing):
    world, batch = start("cpu"), collate(rows_of())
    before = copy.deepcopy(batch["tokens"])
    seen = []
    for micro in MicroBatcher(20, packing, share_prefix=packing).micro_batches(batch, batch[:1], world, None):
        assert "media" not in micro.batch.keys()
        order = micro.batch["scores"].long()
        if packing:  # the packed sequence is read: a row's ids are 100 (number + 1) and on
            packed = micro.batch["tokens", "input_ids"].flatten()[micro.layout.source] // 100 - 1
            order = torch.unique_consecutive(packed)
            assert sorted(order.tolist()) == sorted(micro.batch["scores"].long().tolist())
        expected = concat_media([MEDIA[row] or {} for row in order.tolist()])
        assert set(micro.media) == set(expected)
        assert all(torch.equal(micro.media[name], tensor) for name, tensor in expected.items())
        seen += order.tolist()
    assert sorted(seen) == list(range(8))
    assert torch.equal(batch["tokens", "attention_mask"], before["attention_mask"]), "the batch stays as it is"


def test_a_micro_batch_without_media_offers_none():
    batch = collate(rows_of([None] * 8))
    for micro in MicroBatcher(20, True, False).micro_batches(batch, batch[:1], start("cpu"), None):
        assert micro.media == {} and "media" not in micro.batch.keys()


def test_equal_tokens_of_rows_with_media_are_not_computed_once():
    for media, shared in (([None] * 2, [2, 2]), ([MEDIA[0]] * 2, [0, 0]), ([MEDIA[0], MEDIA[2]], [0, 0])):
        rows = rows_of(media, [4, 4], [0, 1])
        for number, row in enumerate(rows):
            row["tokens"]["input_ids"] = torch.tensor([5, 6, 7 + number, 9])
        assert shared_prefixes(collate(rows)).tolist() == shared


def test_a_dummy_row_has_no_media_and_no_token_that_refers_to_them():
    batch = collate(rows_of())[torch.tensor([2, 1, 0])]
    rows = batch[:0]
    rows["loss_weights"] = torch.ones(0, 12)
    dummy = first_token(dummy_row(batch, rows))
    assert not dummy["loss_mask"].any() and not dummy["loss_weights"].any() and not has_media(dummy)
    assert dummy["tokens", "input_ids"].tolist() == [[0]], "its first token may stand for media"
    assert batch["loss_mask"].any(1).all() and has_media(batch[:1]), "the batch stays as it is"
    alone = first_token(dummy_row(batch[1:2], rows))
    assert alone["tokens", "input_ids"].tolist() == [[200]]
    assert batch["tokens", "attention_mask"].sum(1).tolist() == [9, 2, 6]


@pytest.mark.parametrize("packing", [False, True])
def test_a_rank_knows_in_which_micro_batches_the_media_of_ranks_differ(ranks, packing):
    batch, device = collate(rows_of()), torch.device("cpu")
    shares = [torch.tensor([0, 2, 5, 7]), torch.tensor([1, 4]), torch.tensor([], dtype=torch.int64)]

    def work_of(world, chosen=None):
        world.device = device
        own = batch[shares[world.rank] if chosen is None else chosen]
        batcher = MicroBatcher(20, packing, False, backbone=torch.nn.Module())
        made = list(batcher.micro_batches(own, dummy_row(batch[5:], own), world, None))
        return [(set(micro.media), micro.media_differ) for micro in made]

    found = ranks(3, work_of)
    assert len({len(micros) for micros in found}) == 1
    for number, micros in enumerate(zip(*found, strict=True)):
        differ = any(kinds != micros[0][0] for kinds, _ in micros)
        assert [told for _, told in micros] == [differ] * 3, number
    assert any(told for _, told in found[0])
    alike = ranks(3, lambda world: work_of(world, shares[0]))
    assert not any(told for micros in alike for _, told in micros)


def test_media_of_a_group_exist_once_in_the_batch_between_ranks_and_in_a_checkpoint():
    """In groups of 16; the numbers of bytes are those of the media and of nothing larger."""
    groups = [rows_of([media] * 16, [3] * 16, range(16)) for media in (picture(0, [5000]), sound(1, 20_000), None)]
    once = sum(tensor.nbytes for group in groups[:2] for tensor in group[0]["media"].values())
    batch = collate([row for group in groups for row in group])
    storages = {tensor.data_ptr(): tensor.nbytes for entry in media_entries(batch) for tensor in entry.values()}
    assert sum(storages.values()) == once
    text = len(pickle.dumps(drop_padding(batch.exclude("media"))))
    assert once < len(pickle.dumps(drop_padding(batch))) - text < once + 2_000

    for number, row in enumerate(row for group in groups for row in group):
        row["fields"] = {"prompt": "data:image/png;base64," + 50_000 * "A", "text": f"answer {number}"}
    node, tensors = split([keep_once(group) for group in groups[:2]])
    assert 2 * 50_000 < len(json.dumps(node)) < 2 * 50_000 + 40_000, "the prompt of a group once, too"
    for group, kept in zip(groups, join(node, tensors), strict=False):
        assert [row["fields"] for row in share_again(kept)] == [row["fields"] for row in group]

    node, tensors = split([keep_once(group) for group in groups])
    assert sum(tensor.nbytes for name, tensor in tensors.items() if "/media/" in name) == once
    for group, expected in zip(join(node, tensors), groups, strict=True):
        media = [expected[0]["media"]] * 16
        same_media(collate(share_again(group)) if media[0] else collate(group), media)
        assert len({id(row.get("media")) for row in share_again(group)}) == 1, "still shared"
