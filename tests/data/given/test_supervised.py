"""Batches of given texts."""

import pytest
import torch

from rft.batch.columns import GIVEN_COLUMNS, fields
from rft.data.base import GivenTexts, given_texts
from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.data.given.supervised import DatasetSource, TextSource
from rft.data.sampler import RowSampler
from rft.distributed import SINGLE_PROCESS
from rft.metrics import Metrics
from tests.data.contexts import source_context

ROWS = [{"prompt": f"{n}=", "answer": str(n), "shown": str(n) * (1 + n % 3)} for n in range(9)]
TOKENIZER = characters(alphabet="0123456789=")


def source(world, prompts=4):
    context = source_context(world, Encoder(TOKENIZER, "none", None), ROWS, prompts, seed=2)
    return DatasetSource(DatasetSource.Options(response="shown"), context)


def test_a_batch_holds_the_named_response_and_the_end_token(ranks):
    [batch] = ranks(1, lambda world: source(world).next(Metrics()))
    assert set(batch.keys()) == set(GIVEN_COLUMNS) == set(DatasetSource.Options(response="shown").facts().writes)
    order = RowSampler(range(9), 2).take(4)
    assert batch["group"].tolist() == batch["unit"].tolist() == [position for position, _ in order]
    assert not batch["truncated"].any()
    for number, (_, row) in enumerate(order):
        real = batch["tokens", "attention_mask"][number].bool()
        ids = batch["tokens", "input_ids"][number]
        assert TOKENIZER.decode(ids[real]) == ROWS[row]["prompt"] + ROWS[row]["shown"] + "<eos>"
        assert TOKENIZER.decode(ids[batch["response_mask"][number]]) == ROWS[row]["shown"] + "<eos>"
        assert fields(batch)[number] == ROWS[row]


def test_its_facts():
    options = DatasetSource.Options(response="shown")
    facts = options.facts()
    assert set(facts.fields) == {"prompt", "shown"} and facts.sampled == "never" and not facts.scores
    assert given_texts(DatasetSource, options) == GivenTexts(DatasetSource, options)
    assert TextSource.Options(response="text").facts().fields == ("text",)
    assert options.always_sampled() == options, "there are no others"


def test_an_epoch_has_every_row_in_the_order_of_the_run(ranks):
    given = GivenTexts(DatasetSource, DatasetSource.Options(response="shown"))
    context = source_context(SINGLE_PROCESS, Encoder(TOKENIZER, "none", None), ROWS, 4, seed=2)
    drawn = [row for batch in given.epoch(context) for row in fields(batch)]
    assert sorted(row["prompt"] for row in drawn[:9]) == sorted(row["prompt"] for row in ROWS) and len(drawn) == 12
    [run] = ranks(1, lambda world: fields(source(world).next(Metrics())))
    assert drawn[:4] == run


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_what_one_rank_draws(size, ranks):
    def steps(world):
        mine = source(world)
        return [mine.next(Metrics()) for _ in range(4)]

    [alone] = ranks(1, steps)
    shared = ranks(size, steps)
    for step, whole in enumerate(alone):
        parts = [theirs[step] for theirs in shared]
        assert torch.equal(torch.cat([part["unit"] for part in parts]).sort().values, whole["unit"])
        texts = {unit: row for part in parts for unit, row in zip(part["unit"].tolist(), fields(part), strict=True)}
        assert [texts[unit] for unit in whole["unit"].tolist()] == fields(whole)


def test_a_source_goes_on_where_it_was_on_any_number_of_ranks(ranks):
    def first(world):
        saved = source(world)
        saved.next(Metrics())
        return world.gather(saved.state_dict()), saved.next(Metrics())["unit"].tolist()

    found = ranks(2, first)

    def second(world):
        restored = source(world)
        restored.load_state_dict(found[0][0][0])
        return restored.next(Metrics())["unit"].tolist()

    [units] = ranks(1, second)
    assert units == sorted(unit for _, theirs in found for unit in theirs) == [4, 5, 6, 7]


def test_a_field_that_holds_the_whole_has_no_prompt_beside_it(ranks):
    rows = [{"prompt": "7=", "text": f"{n}={n}"} for n in range(4)]

    def draw(world):
        context = source_context(world, Encoder(TOKENIZER, "none", None), rows, 4, seed=2)
        return TextSource(TextSource.Options(response="text"), context).next(Metrics())

    [batch] = ranks(1, draw)
    for number, (_, row) in enumerate(RowSampler(range(4), 2).take(4)):
        assert TOKENIZER.decode(batch["tokens", "input_ids"][number]) == f"{row}={row}<eos>"
        assert batch["response_mask"][number].tolist() == [False, True, True, True]
        assert fields(batch)[number] == rows[row]
