"""Batches of answers in steps: the tokens of TRL, and a label at the end of each step."""

import pytest
import torch

from rft.batch.columns import SOURCE_COLUMNS, lengths
from rft.data.encode.encoder import Encoder
from rft.data.encode.tokenizer import characters
from rft.data.given.steps import StepSource
from rft.data.sampler import RowSampler
from rft.metrics import Metrics
from tests.data.contexts import check_context, source_context

FACTS = StepSource.Options(steps="a", labels="b", separator="c").facts()
TOKENIZER = characters(alphabet="0123456789=\n;")
ROWS = [
    {"prompt": "1=", "completions": ["12", "3"], "labels": [True, False]},
    {"prompt": "22=", "completions": ["", "4", "567"], "labels": [1, 0.25, 0]},
    {"prompt": "=", "completions": ["8"], "labels": ["0.5"]},
]


def source(world, rows=ROWS, separator=";\n", prompts=3):
    options = StepSource.Options(steps="completions", labels="labels", separator=separator)
    return StepSource(options, source_context(world, Encoder(TOKENIZER, "none", None), rows, prompts, 0))


def steps(batch):
    """Of every row its text, and the text up to the end of each step, with the label."""
    rows = zip(batch["tokens", "input_ids"].tolist(), lengths(batch).tolist(), strict=True)
    texts = [TOKENIZER.decode(ids[:length]) for ids, length in rows]
    ends = [mask.nonzero()[:, 0].tolist() for mask in batch["response_mask"]]
    return [
        (text, [(text[: end + 1], float(labels[end])) for end in places])
        for text, places, labels in zip(texts, ends, batch["step_labels"], strict=True)
    ]


EXPECTED = [
    ("1=12;\n3;\n", [("1=12;\n", 1.0), ("1=12;\n3;\n", 0.0)]),
    ("22=;\n4;\n567;\n", [("22=;\n", 1.0), ("22=;\n4;\n", 0.25), ("22=;\n4;\n567;\n", 0.0)]),
    ("=8;\n", [("=8;\n", 0.5)]),
]


@pytest.mark.parametrize("size", [1, 3])
def test_a_separator_ends_every_step_and_has_its_label_on_any_number_of_ranks(ranks, size):
    batches = ranks(size, lambda world: source(world).next(Metrics()))
    assert set(batches[0].keys()) == {*SOURCE_COLUMNS, "step_labels"} == set(FACTS.writes)
    found = {text: told for batch in batches for text, told in steps(batch)}
    assert found == dict(EXPECTED) and {place for _, place in RowSampler(range(3), 0).take(3)} == {0, 1, 2}
    for batch in batches:
        assert not batch["step_labels"][~batch["response_mask"]].any() and batch["step_labels"].dtype == torch.float32
    assert FACTS.fields == ("prompt", "a", "b") and FACTS.sampled == "never"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [True]}, "algorithm.source.labels=labels: a row has 1 labels for 2 steps; give one for every step"),
        ({"labels": [1, 1.5]}, r"algorithm.source.labels=labels: expected true, false or a number .*, got \[1, 1.5\]"),
        ({"labels": None}, "algorithm.source.labels=labels: expected true, false or a number .*, got None"),
        ({"completions": "12"}, "steps: expected a list of texts, got '12'"),
        ({"completions": []}, r"steps: expected a list of texts, got \[\]"),
        ({"completions": [1, "2"]}, r"steps: expected a list of texts, got \[1, '2'\]"),
    ],
)
def test_what_is_no_labelled_answer_is_refused(ranks, changes, message):
    with pytest.raises(ValueError, match=message):
        ranks(1, lambda world: source(world, [ROWS[0] | changes], prompts=1).next(Metrics()))


def test_a_separator_is_a_text():
    with pytest.raises(ValueError, match=r"^algorithm\.source\.separator is empty"):
        StepSource.Options(steps="a", labels="b", separator="").check(check_context())
