"""Prompts over data.max_prompt_tokens are cut on their token ids, as verl's data.truncation does, or refused."""

import json

import pytest

from rft.data.encode.encoder import Encoder
from rft.data.encode.lengths import Lengths, limit_prompts
from rft.data.encode.tokenizer import characters
from rft.data.encode.truncation import PromptLimit
from rft.data.rows.sources import FileRows
from rft.distributed import SINGLE_PROCESS
from rft.rollout.engine.hf import HFEngine
from rft.setup.assembly import Job

TOKENIZER = characters(alphabet="0123456789=")


def encoder(truncation, most, **options):
    return Encoder(TOKENIZER, "none", None, limit=PromptLimit(most, truncation), **options)


def text(ids):
    return TOKENIZER.decode(ids)


@pytest.mark.parametrize(
    ("truncation", "most", "left"),
    [
        ("left", 4, "6789"), ("right", 4, "1234"), ("middle", 4, "1289"), ("middle", 5, "12789"), ("middle", 1, "9"),
        ("left", 9, "123456789"), ("drop", 4, "123456789"),
    ],
)  # fmt: skip
def test_the_tokens_that_stay(truncation, most, left):
    assert PromptLimit(most, truncation).cut(list("123456789")) == list(left)


@pytest.mark.parametrize(("truncation", "left"), [("left", "6789"), ("right", "1234"), ("middle", "1289")])
def test_a_prompt_has_the_same_tokens_where_it_is_sampled_and_where_it_is_given(truncation, left):
    cuts, row = encoder(truncation, 4), {"prompt": "123456789", "response": "56"}
    assert text(cuts.prompt(row)) == left
    ids, trains = cuts.example(row)
    assert text(ids[:-1]) == left + "56" and ids[-1] == TOKENIZER.eos_token_id
    assert trains == [False] * 4 + [True] * 3
    assert cuts.example({"prompt": "1234", "response": "56"}) == encoder("drop", 4).example(
        {"prompt": "1234", "response": "56"}
    )


def test_nothing_predicts_the_first_token_that_is_left():
    ids, trains = encoder("left", 2, train_on="all").example({"prompt": "12345", "response": "6"})
    assert text(ids[:3]) == "456" and trains == [False, True, True, True]


def test_the_cut_applies_to_the_tokens_of_the_template():
    """As in verl: a cut on the left removes the beginning of the template."""
    cuts = Encoder(TOKENIZER, "none", None, limit=PromptLimit(3, "left"))
    whole = {"prompt": "12345="}
    assert cuts.prompt(whole) == cuts.whole_prompts([whole])[0][-3:]


def test_counts_and_messages_are_those_of_the_cut_prompts():
    rows, said = [{"prompt": "1" * length} for length in (3, 9, 5)], []
    lengths = Lengths(SINGLE_PROCESS, encoder("right", 4), None)
    kept, counts = limit_prompts(rows, lengths.whole_prompts(rows), PromptLimit(4, "right"), "data.train", said.append)
    assert kept is rows and counts.tolist() == lengths.prompts(rows).tolist() == [3, 4, 4]
    assert said == [
        "data.train: 2 of 3 prompts have more tokens than data.max_prompt_tokens=4; the longest has 9. They are cut to "
        "4 tokens (data.truncation=right)"
    ]


def test_error_names_file_and_line(tmp_path):
    for name, prompts in (("a.jsonl", ["1", "2"]), ("b.jsonl", ["3", "", "45678"])):
        lines = [json.dumps({"prompt": prompt}) if prompt else "" for prompt in prompts]
        (tmp_path / name).write_text("\n".join(lines))
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    rows = FileRows(files, {}, None, None, "data.train").load(["prompt"])
    limit = PromptLimit(4, "error")
    counts = Lengths(SINGLE_PROCESS, encoder("error", 4), None).whole_prompts(rows)
    with pytest.raises(ValueError, match=r"data\.train: .*b\.jsonl line 3: the prompt has 5 tokens, over data\.max_pr"):
        limit_prompts(rows, counts, limit, "data.train", print)
    kept, same = limit_prompts(rows, counts, PromptLimit(5, "error"), "data.train", print)
    assert kept is rows and same is counts


def test_error_without_a_file_names_the_row():
    with pytest.raises(ValueError, match=r"row 2: the prompt \(it begins '12345'\) has 5 tokens, over data\.max_pro"):
        encoder("error", 4).prompts([{"prompt": "1"}, {"prompt": "12345"}])


@pytest.mark.parametrize("streaming", [None, 8])
def test_the_engine_gets_the_cut_tokens(streaming, tiny, tmp_path, monkeypatch):
    """From a file, from a stream, and in the held-out set: no prompt has more than four tokens, and none is dropped."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}23456=", "answer": "1"}}\n' for n in range(8)))
    (tmp_path / "held.jsonl").write_text('{"prompt": "9876543=", "answer": "1"}\n')
    config = tiny("steps=1", "warmup=none", "data.max_prompt_tokens=4", "data.truncation=middle", "batch.prompts=8")
    node = {"_target_": "rft.data.rows.sources.FileRows", "columns": {}, "schema": None, "limit": None}
    train, held = (node | {"path": str(tmp_path / name)} for name in ("rows.jsonl", "held.jsonl"))
    data = config["data"] | {"streaming": streaming, "train": train, "eval": {"heldout": held}}
    sent, generate = set(), HFEngine.generate

    def record(engine, requests, *rest):
        sent.update(tuple(request.prompt) for request in requests)
        return generate(engine, requests, *rest)

    monkeypatch.setattr(HFEngine, "generate", record)
    job = Job(config | {"data": data})
    job.fit("")
    decode = job.tokenizer.build().decode
    assert {decode(prompt) for prompt in sent} == {f"{n}26=" for n in range(8)} | {"983="}


def test_a_cut_without_a_limit_is_refused(tiny):
    with pytest.raises(ValueError, match=r"data\.truncation=left has no effect without a limit; set data\.max_prompt"):
        Job(tiny("data.truncation=left"))
