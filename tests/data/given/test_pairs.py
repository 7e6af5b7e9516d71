"""Batches of given preferences."""

from dataclasses import replace

import pytest
import torch

from rft.batch.columns import GIVEN_COLUMNS, fields
from rft.data.base import GivenTexts, given_texts
from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.data.given.pairs import LabelledSource, PairSource
from rft.data.sampler import RowSampler
from rft.metrics import Metrics
from tests.data.contexts import check_context, source_context

ROWS = [
    {"prompt": f"{n}=", "good": str(n), "bad": str(n) * (2 + n % 3), "gap": n / 2, "right": n % 3 == 0}
    for n in range(9)
]
TOKENIZER = characters(alphabet="0123456789=")
PAIR = PairSource.Options(chosen="good", rejected="bad", margin=None)
LABELLED = LabelledSource.Options(response="bad", label="right")


def pairs(world, prompts=4, margin=None, rows=ROWS):
    context = source_context(world, Encoder(TOKENIZER, "none", None), rows, prompts, 2)
    return PairSource(replace(PAIR, margin=margin), context)


def labelled(world, prompts=4, rows=ROWS):
    context = source_context(world, Encoder(TOKENIZER, "none", None), rows, prompts, 2)
    return LabelledSource(LABELLED, context)


def texts(batch):
    """(the whole row, what trains) of every row."""
    ids, real = batch["tokens", "input_ids"], batch["tokens", "attention_mask"].bool()
    return [
        (TOKENIZER.decode(row[there]), TOKENIZER.decode(row[trains]))
        for row, there, trains in zip(ids, real, batch["response_mask"], strict=True)
    ]


def test_a_pair_is_two_rows_of_one_unit_the_chosen_first(ranks):
    [batch] = ranks(1, lambda world: pairs(world).next(Metrics()))
    assert set(batch.keys()) == {*GIVEN_COLUMNS, "chosen"} == set(PAIR.facts().writes)
    order = RowSampler(range(9), 2).take(4)
    positions = [position for position, _ in order for _ in range(2)]
    assert batch["group"].tolist() == batch["unit"].tolist() == positions
    assert batch["chosen"].tolist() == [True, False] * 4 and batch["chosen"].dtype == torch.bool
    assert not batch["truncated"].any()
    found = texts(batch)
    for number, (_, place) in enumerate(order):
        row = ROWS[place]
        for text, field in zip(found[2 * number : 2 * number + 2], ("good", "bad"), strict=True):
            assert text == (row["prompt"] + row[field] + "<eos>", row[field] + "<eos>")
        assert fields(batch)[2 * number] == fields(batch)[2 * number + 1] == row


def test_both_rows_of_a_pair_have_its_margin(ranks):
    [batch] = ranks(1, lambda world: pairs(world, margin="gap").next(Metrics()))
    expected = [ROWS[place]["gap"] for _, place in RowSampler(range(9), 2).take(4) for _ in range(2)]
    assert batch["margin"].tolist() == expected and batch["margin"].dtype == torch.float32


def test_sources_say_what_a_row_must_have():
    plain, graded = PAIR.facts(), replace(PAIR, margin="gap").facts()
    assert set(plain.fields) == {"prompt", "good", "bad"} and "margin" not in plain.writes
    assert set(graded.fields) == {"prompt", "good", "bad", "gap"} and "margin" in graded.writes
    facts = LABELLED.facts()
    assert set(facts.fields) == {"prompt", "bad", "right"}
    for one in (plain, graded, facts):
        assert one.sampled == "never" and not one.scores and not one.writes_if_read
    assert given_texts(PairSource, PAIR) == GivenTexts(PairSource, PAIR)


def test_a_margin_that_nothing_reads_is_refused():
    replace(PAIR, margin="gap").check(check_context(reads=("margin",)))
    PAIR.check(check_context())
    with pytest.raises(ValueError, match=r"^algorithm\.source\.margin=gap: no function reads 'margin'; set it"):
        replace(PAIR, margin="gap").check(check_context())


def test_a_labelled_row_is_followed_by_the_next_response_behind_its_prompt(ranks):
    [batch] = ranks(1, lambda world: labelled(world).next(Metrics()))
    assert set(batch.keys()) == {*GIVEN_COLUMNS, "label", "mismatched"} == set(LABELLED.facts().writes)
    assert batch["mismatched"].tolist() == [False, True] * 4
    order = [place for _, place in RowSampler(range(9), 2).take(4)]
    found = texts(batch)
    for number, place in enumerate(order):
        own, other = ROWS[place], ROWS[order[(number + 1) % 4]]
        assert found[2 * number] == (own["prompt"] + own["bad"] + "<eos>", own["bad"] + "<eos>")
        assert found[2 * number + 1] == (own["prompt"] + other["bad"] + "<eos>", other["bad"] + "<eos>")
        assert batch["label"][2 * number : 2 * number + 2].tolist() == [own["right"]] * 2


def test_a_mismatched_response_is_one_to_another_prompt(ranks):
    """Of the step, or else of the data set; rows of one prompt are refused."""
    order = [place for _, place in RowSampler(range(9), 2).take(4)]
    same = [row | {"prompt": "77="} if place in order[:2] else row for place, row in enumerate(ROWS)]
    [batch] = ranks(1, lambda world: labelled(world, rows=same).next(Metrics()))
    found = texts(batch)
    assert [found[2 * number + 1][1] for number in range(4)] == [
        ROWS[order[other]]["bad"] + "<eos>" for other in (2, 2, 3, 0)
    ]
    one = [row | {"prompt": "77="} if place in order else row for place, row in enumerate(ROWS)]
    [batch] = ranks(1, lambda world: labelled(world, rows=one).next(Metrics()))
    for number, place in enumerate(order):
        other = next(n % 9 for n in range(place + 1, place + 9) if n % 9 not in order)
        assert texts(batch)[2 * number + 1] == ("77=" + ROWS[other]["bad"] + "<eos>", ROWS[other]["bad"] + "<eos>")
    with pytest.raises(ValueError, match="all rows have one prompt; add rows with others"):
        ranks(1, lambda world: labelled(world, rows=[row | {"prompt": "77="} for row in ROWS]).next(Metrics()))


@pytest.mark.parametrize("make", [pairs, labelled])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_what_one_rank_draws_and_a_unit_is_on_one_rank(make, size, ranks):
    def steps(world):
        mine = make(world)
        return [mine.next(Metrics()) for _ in range(4)]

    [alone] = ranks(1, steps)
    shared = ranks(size, steps)
    for step, whole in enumerate(alone):
        parts = [theirs[step] for theirs in shared]
        units = [set(part["unit"].tolist()) for part in parts]
        assert sum(map(len, units)) == len(set.union(*units)) == 4
        rows = sorted(
            (unit, text) for part in parts for unit, text in zip(part["unit"].tolist(), texts(part), strict=True)
        )
        assert rows == sorted(zip(whole["unit"].tolist(), texts(whole), strict=True))


@pytest.mark.parametrize("make", [pairs, labelled])
def test_a_source_goes_on_where_it_was(make, ranks):
    def work(world):
        first, second = make(world), make(world)
        first.next(Metrics())
        second.load_state_dict(first.state_dict())
        return first.next(Metrics())["unit"].tolist(), second.next(Metrics())["unit"].tolist()

    [(first, second)] = ranks(1, work)
    assert first == second == [4, 4, 5, 5, 6, 6, 7, 7]


def test_what_cannot_be_read_is_refused(ranks):
    def drawn(make):
        return lambda world: make(world).next(Metrics())

    with pytest.raises(ValueError, match=r"^batch\.prompts=1: .* set it to 2 or more$"):
        LABELLED.check(check_context(prompts=1))
    wrong = [row | {"right": "good", "gap": "wide"} for row in ROWS]
    with pytest.raises(
        ValueError, match=r"^row \d: algorithm\.source\.label=right: 'good' .* not true or false; name another field$"
    ):
        ranks(1, drawn(lambda world: labelled(world, rows=wrong)))
    with pytest.raises(
        ValueError, match=r"^row \d: algorithm\.source\.margin=gap: 'wide' .* not a finite number; name another"
    ):
        ranks(1, drawn(lambda world: pairs(world, margin="gap", rows=wrong)))


def test_files_of_text_have_labels_and_margins_too(ranks):
    spelt = [row | {"right": str(row["right"]), "gap": str(row["gap"])} for row in ROWS]

    def work(make, **options):
        [batch] = ranks(1, lambda world: make(world, **options).next(Metrics()))
        return batch

    assert torch.equal(work(labelled, rows=spelt)["label"], work(labelled)["label"])
    assert torch.equal(work(pairs, rows=spelt, margin="gap")["margin"], work(pairs, margin="gap")["margin"])
