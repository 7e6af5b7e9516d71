"""Given texts over data.max_tokens or the model's context are refused, left out or cut, by data.overlong."""

import json

import pytest

from rft.batch.columns import lengths
from rft.batch.encoded import EncodedText
from rft.data.base import GivenTexts
from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths, limit_texts
from rft.data.encode.stream_limits import short_texts
from rft.data.encode.tokenizer import characters
from rft.data.encode.truncation import TextLimit
from rft.data.given.pairs import LabelledSource, PairSource
from rft.data.given.steps import StepSource
from rft.data.given.supervised import DatasetSource, TextSource
from rft.data.rows.mixture import Mixed
from rft.data.rows.sources import FileRows
from rft.distributed import SINGLE_PROCESS
from rft.errors import Problems
from rft.metrics import Metrics
from rft.setup.assembly import Job
from tests.data import chat_texts as chats
from tests.data.contexts import source_context
from tests.data.encode.test_masks import said, tokenizer
from tests.families import family
from tests.families.rows import encoder as media_encoder
from tests.families.rows import rows as media_rows

TOKENIZER = characters(alphabet="0123456789=;")
RESPONSE = GivenTexts(DatasetSource, DatasetSource.Options(response="response"))
PAIR = GivenTexts(PairSource, PairSource.Options(chosen="chosen", rejected="rejected", margin=None))
LABEL = GivenTexts(LabelledSource, LabelledSource.Options(response="response", label="label"))
STEPS = GivenTexts(StepSource, StepSource.Options(steps="steps", labels="labels", separator=";"))


def limit(most, overlong):
    return TextLimit(most, overlong, f"data.max_tokens={most}", frozenset())


def fitted(given, rows, most, overlong, made=None):
    """The rows that stay, what the run says, and what of their texts is read and trains, in the order of the rows."""
    made, messages = made or Encoder(TOKENIZER, "none", None), []
    kept, counts = limit_texts(
        rows,
        Lengths(SINGLE_PROCESS, made, None).texts(given, rows),
        limit(most, overlong),
        "data.train",
        messages.append,
    )
    made.text_limit = limit(most, overlong)
    batch = given.build(source_context(SINGLE_PROCESS, made, kept, len(kept), 0, shuffle=False)).next(Metrics())
    assert lengths(batch).max() == max(counts) or given is LABEL
    return list(kept), messages, batch


def spelled(batch):
    """(text, what of it trains) of each row of a batch."""
    rows = zip(batch["tokens", "input_ids"], batch["response_mask"], lengths(batch).tolist(), strict=True)
    return [(TOKENIZER.decode(ids[:end]), TOKENIZER.decode(ids[trains])) for ids, trains, end in rows]


def test_the_tokens_that_stay():
    text = EncodedText([5, 6, 7, 8], {"kind": [0, 1]})
    for overlong in ("error", "drop", "truncate"):
        assert limit(4, overlong).cut(text, overlong) is text
    cut = limit(3, "truncate").cut(text, "truncate")
    assert cut == [5, 6, 7] and cut.column("kind") == [0, 1, 0]
    with pytest.raises(
        ValueError, match=r"the row has 4 tokens, over data\.max_tokens=3; remove it, or set data\.overl"
    ):
        limit(3, "error").cut(text, "error")
    kept = [limit(3, overlong).keeps([4, 4, 3], [3, 4, 2]).tolist() for overlong in ("error", "drop", "truncate")]
    assert kept == [[False, False, True], [False, False, True], [True, False, True]]


ROWS = [{"prompt": "12=", "response": answer} for answer in ("3", "34", "3456")] + [
    {"prompt": "12345=", "response": "6"}
]


def test_a_row_that_is_too_long_is_left_out_and_counted():
    kept, messages, batch = fitted(RESPONSE, ROWS, 6, "drop")
    assert kept == ROWS[:2] and spelled(batch) == [("12=3<eos>", "3<eos>"), ("12=34<eos>", "34<eos>")]
    assert messages == [
        "data.train: 2 of 4 rows have more tokens than data.max_tokens=6; the longest has 8. Dropped: 2 "
        "(data.overlong=drop)"
    ]


def test_a_row_that_is_cut_ends_without_an_end_token_and_one_without_a_trained_token_is_left_out():
    kept, messages, batch = fitted(RESPONSE, ROWS, 6, "truncate")
    assert kept == ROWS[:3]
    assert spelled(batch)[1:] == [("12=34<eos>", "34<eos>"), ("12=345", "345")]
    assert messages == [
        "data.train: 2 of 4 rows have more tokens than data.max_tokens=6; the longest has 8. Cut to 6 tokens: 1. "
        "Dropped, since a cut would leave no token that trains, or not all media: 1 (data.overlong=truncate)"
    ]
    assert fitted(RESPONSE, ROWS, 8, "truncate")[:2] == (ROWS, []), "nothing is said where every row fits"
    assert spelled(fitted(RESPONSE, ROWS, 7, "truncate")[2])[3] == ("12345=6", "6")


def test_an_error_names_the_row_and_both_cures(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = FileRows(str(file), {}, None, None, "data.train").load(["prompt"])
    with pytest.raises(ValueError) as caught:
        fitted(RESPONSE, rows, 7, "error")
    for part in (
        "data.train: ",
        "a.jsonl line 3: the row has 8 tokens",
        "data.max_tokens=7",
        "overlong=drop",
        "=truncate",
    ):
        assert part in str(caught.value)
    with pytest.raises(
        ValueError, match=r"the longest has 8, and no row is left with data\.overlong=drop; raise the limit"
    ):
        fitted(RESPONSE, rows, 4, "drop")


def test_both_sides_of_a_pair_are_cut_and_one_that_trains_nothing_takes_the_pair_along():
    rows = [{"prompt": "12=", "chosen": "3456", "rejected": "7"}, {"prompt": "123=", "chosen": "5", "rejected": "6789"}]
    kept, _, batch = fitted(PAIR, rows, 5, "truncate")
    assert kept == rows
    assert spelled(batch) == [("12=34", "34"), ("12=7<eos>", "7<eos>"), ("123=5", "5"), ("123=6", "6")]
    last = [trains.nonzero()[-1].item() for trains in batch["response_mask"]]
    assert last == [end - 1 for end in lengths(batch).tolist()], "a score is read at the last token that is left"
    assert fitted(PAIR, rows, 4, "truncate")[0] == rows[:1]
    assert fitted(PAIR, rows, 8, "drop")[0] == rows[:1]


@pytest.mark.parametrize("overlong", ["drop", "truncate", "error"])
def test_a_mismatched_row_is_cut_whatever_happens_to_others(overlong):
    rows = [{"prompt": "1=", "response": "23456", "label": 1}, {"prompt": "1234=", "response": "5", "label": 0}]
    kept, messages, batch = fitted(LABEL, rows, 8, overlong)
    assert kept == rows and messages == []
    assert [text for text, _ in spelled(batch)] == ["1=23456<eos>", "1=5<eos>", "1234=5<eos>", "1234=234"]
    assert batch["mismatched"].tolist() == [False, True, False, True] and batch["label"].tolist() == [1, 1, 0, 0]


def test_steps_behind_the_cut_are_left_out_with_their_labels():
    rows = [
        {"prompt": "1=", "steps": ["2", "34", "5"], "labels": [1, 0, 1]},
        {"prompt": "1234=", "steps": ["5"], "labels": [1]},
    ]
    kept, _, batch = fitted(STEPS, rows, 7, "truncate")
    assert kept == rows and spelled(batch) == [("1=2;34;", ";;"), ("1234=5;", ";")]
    assert batch["step_labels"].tolist() == [[0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1]]
    kept, _, batch = fitted(STEPS, rows, 6, "truncate")
    assert kept == rows[:1] and spelled(batch) == [("1=2;34", ";")]


def test_a_conversation_keeps_the_answers_before_the_cut():
    made = Encoder(tokenizer(chats.CHATML), "chat", None)
    messages = [{"role": "user", "content": "1"}, said("2"), {"role": "user", "content": "3"}, said("456")]
    rows, given = [{"messages": messages}], GivenTexts(TextSource, TextSource.Options(response="messages"))
    tokens, least, *_ = Lengths(SINGLE_PROCESS, made, None).texts(given, rows)
    ids, trains = made.example({"response": messages})
    assert tokens == len(ids) and least == trains.index(True) + 1
    second = max(place for place, flag in enumerate(trains) if flag and not trains[place - 1])
    _, _, batch = fitted(given, rows, second, "truncate", made)
    assert (
        batch["tokens", "input_ids"][0].tolist() == ids[:second]
        and batch["response_mask"][0].tolist() == trains[:second]
    )
    assert not trains[second - 1], "the first answer trains, and the question behind it is read"


def test_media_are_never_cut():
    one = family("qwen2_5_vl")
    made, [row, *_] = media_encoder(one), media_rows(one)
    rows = [row | {"response": "two"}]
    tokens, least, *_ = Lengths(SINGLE_PROCESS, made, None).texts(RESPONSE, rows)
    ids, trains = made.example(rows[0])
    assert (tokens, least) == (len(ids), trains.index(True) + 1)
    made._train_on = "all"
    media = frozenset(made.media_facts.placeholders)
    last = max(place for place, token in enumerate(ids) if token in media)
    tokens, least, *_ = Lengths(SINGLE_PROCESS, made, None).texts(RESPONSE, rows)
    assert (tokens, least) == (len(ids), last + 1)
    made.text_limit = TextLimit(last, "truncate", "data.max_tokens=x", media)
    with pytest.raises(
        ValueError, match=rf"{len(ids)} tokens, over data\.max_tokens=x, and media behind the first {last}"
    ):
        made.example(rows[0])
    made.text_limit = TextLimit(last + 1, "truncate", "data.max_tokens=x", media)
    assert made.example(rows[0])[0].media.keys() == ids.media.keys()


def test_a_mixture_keeps_its_parts():
    mixed = Mixed({"a": ROWS[:2], "b": ROWS[2:]}, {"a": 1.0, "b": 2.0})
    kept, _, _ = fitted(RESPONSE, mixed, 7, "truncate")
    assert [row["data_source"] for row in kept] == ["a", "a", "b", "b"]
    with pytest.raises(ValueError, match=r"data\.train\.parts\.b: all rows have more tokens than data\.max_tokens=6"):
        fitted(RESPONSE, mixed, 6, "drop")


@pytest.mark.parametrize(("overlong", "left"), [("drop", [0, 1]), ("truncate", [0, 1, 2])])
@pytest.mark.parametrize("kind", [RESPONSE, LABEL])
def test_a_stream_drops_them_when_they_are_read(tmp_path, ranks, overlong, left, kind):
    rows = [row | {"label": True, "prompt": f"{number}{row['prompt'][1:]}"} for number, row in enumerate(ROWS)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = FileRows(str(file), {}, None, None, "data.train").stream(["prompt"])
    messages = []

    def source():
        made = Encoder(TOKENIZER, "none", None)
        made.text_limit = limit(6, overlong)
        stream = parts.open(3, [short_texts(made, made.text_limit, kind, parts)], messages.append)
        return kind.build(source_context(SINGLE_PROCESS, made, stream, 2, 0, shuffle=False))

    def drawn(mine, steps):
        each = 2 if kind is LABEL else 1
        return [int(text[0]) for _ in range(steps) for text, _ in spelled(mine.next(Metrics()))[::each]]

    whole, later = source(), source()
    found = drawn(whole, 3)
    assert found == (left * 3)[:6] and "data.max_tokens=6" in messages[0]
    later.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert drawn(later, 2) == drawn(whole, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data.max_tokens=600", "algorithm=sft"),
            r"data\.max_tokens=600 is over the model's context of \d+; lower it",
        ),
        (
            ("data.max_tokens=8", "algorithm=sft"),
            r"data\.train: row \d+: the row has \d+ tokens, over data\.max_tokens=8",
        ),
        (("data.overlong=drop", "data.max_tokens=3"), r"no row is left with data\.overlong=drop"),
    ],
)
def test_a_run_refuses_before_a_model_is_loaded(tiny, overrides, message):
    job = Job(tiny(*overrides))
    job.load(1)
    with pytest.raises(Problems, match=message):
        job.check.end()


@pytest.mark.parametrize("algorithm", ["sft", "reward_model", "dpo", "kto"])
def test_held_out_rows_are_cut_as_training_rows_are(tiny, algorithm):
    loss = () if algorithm == "reward_model" else ("eval.loss=true",)
    overrides = ("warmup=none", *loss, "data.overlong=truncate", "data.max_tokens=16")
    job = Job(tiny(f"algorithm={algorithm}", *overrides))
    loaded = job.load(1)
    job.check.end()
    assert loaded.encoder.text_limit.most == 16 == loaded.longest_text
    for key in ("data.train", "data.eval.heldout"):
        [message] = [text for text in loaded.messages if text.startswith(f"{key}: ")]
        assert ". Cut to 16 tokens: " in message


def test_a_run_trains_on_the_rows_that_are_left(tiny):
    """Of 1 to 3 digits a row has 12, 14 or 16 tokens."""
    overrides = (
        "warmup=none",
        "data.train.length=[1,3]",
        "data.max_tokens=14",
        "steps=null",
        "epochs=1",
        "batch.prompts=4",
    )
    every = Job(tiny("algorithm=sft", *overrides[:2])).load(1).train
    job = Job(tiny("algorithm=sft", *overrides, "data.overlong=drop", "data.eval.heldout.length=[1,2]"))
    loaded = job.load(1)
    job.check.end()
    short = [row for row in every if len(row["response"]) < 3]
    assert list(loaded.train) == short and 0 < len(short) < len(every) and loaded.longest_text == 14
    assert job.run.steps == -(-len(short) // 4), "an epoch has the rows that are left"
    warm = Job(tiny("warmup.steps=1", "data.train.length=[1,3]", "data.max_tokens=14", "data.overlong=drop"))
    assert list(warm.load(1).train) == short and warm.facts.sampled == "always", "rows of the warm-up"
