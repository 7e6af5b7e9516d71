"""What a source of given texts will draw, known before the run."""

import pytest

from rft.batch.columns import fields
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths
from rft.data.encode.tokenizer import characters
from rft.data.given.survey import SINGLE_PROCESS, check_examples, epoch, only_reads
from rft.registry import Target
from rft.setup.components import FROM_ROLLOUT

ROWS = [{"prompt": f"{n}=", "response": "1" * (n + 1)} for n in range(9)]
ENCODER = Encoder(characters(alphabet="0123456789="), "none", None)


def given(**options):
    node = {"_target_": "rft.data.given.supervised.DatasetSource", "response": "response", **options}
    return Target(node, "algorithm.source", FROM_ROLLOUT)


def test_an_epoch_has_every_row_in_the_order_of_the_run(ranks):
    drawn = [row for batch in epoch(given(), SINGLE_PROCESS, ENCODER, ROWS, 4, seed=3) for row in fields(batch)]
    assert sorted(row["prompt"] for row in drawn[:9]) == sorted(row["prompt"] for row in ROWS) and len(drawn) == 12

    def first(world):
        source = given().build(world=world, encoder=ENCODER, rows=ROWS, prompts=4, seed=3)
        return fields(source.next(None))

    [run] = ranks(1, first)
    assert drawn[:4] == run


def test_a_source_that_samples_does_not_only_read():
    rollout = {"_target_": "rft.rollout.source.rollout.RolloutSource", "redraw": None, "interruption": None}
    assert only_reads(given()) and not only_reads(Target(rollout, "algorithm.source", FROM_ROLLOUT))


def test_a_row_that_is_longer_than_the_context():
    counts = Lengths(SINGLE_PROCESS, ENCODER, None).examples(given(), ROWS, 4, seed=3)
    check_examples(counts, 12)  # 2 of the prompt, 9, and the end
    with pytest.raises(ValueError, match=r"data\.train: the longest row has 12 tokens, over the model's context of 11"):
        check_examples(counts, 11)
