"""What mode=inspect prints."""

import io
import json
import re

import pytest
from rich.console import Console

from rft.data.base import SourceContext, given_texts
from rft.data.encode.tokenizer import characters
from rft.distributed import SINGLE_PROCESS
from rft.modes.inspect import READ, SPECIAL, TRAINED, Example, inspect, spelled
from rft.setup.assembly import Job

CHAT = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + (eos_token if m.role == 'assistant' else ';') }}"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def shown(tiny, monkeypatch):
    """What is printed for overrides of a tiny run; no model is loaded."""
    monkeypatch.setattr("rft.actor.model.load_with_head", lambda *_: pytest.fail("a model was loaded"))

    def show(*overrides, config=None):
        console = Console(file=io.StringIO(), width=100, soft_wrap=True)
        try:
            inspect(config or tiny("mode=inspect", *overrides), console)
        finally:
            show.said = console.file.getvalue()
        return show.said

    return show


def conversations(tiny, tmp_path, messages, **data):
    """The config of a run on one conversation, with a template in a file."""
    (tmp_path / "chat.jinja").write_text(CHAT)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    config = tiny("mode=inspect", "algorithm=sft", "algorithm/source=conversation", "batch.prompts=1")
    rows = {
        "_target_": "rft.data.rows.sources.FileRows",
        "path": str(tmp_path / "rows.jsonl"),
        "columns": {},
        "limit": None,
    }
    config["data"] |= {"template": str(tmp_path / "chat.jinja"), "train": rows | {"schema": None}} | data
    config["actor"]["tokenizer"]["alphabet"] += "aus:;"
    return config


def test_a_supervised_stage_shows_what_trains_and_a_rollout_what_is_answered(shown):
    said = shown("inspect.rows=2", "warmup.source.response=response")
    warmup, train = said.split("train: prompts to sample answers from")
    assert warmup.count("row ") == 2 + 1 and train.count("row ") == 2 + 1  # and once of all rows
    assert "row 1: 18 tokens, 5 train" in warmup and "<eos>⟧" in warmup
    assert "row 1: 13 tokens\n" in train and "⟦" not in train
    assert "64 of 64 rows fit into the model's context of 128 tokens with an answer of 6." in train


def test_it_is_what_the_first_step_trains_on(shown, tiny, monkeypatch):
    said = shown("algorithm=sft", "inspect.rows=4")
    job = Job(tiny("algorithm=sft"))
    loaded = job.load(1)
    run = job.run
    context = SourceContext(SINGLE_PROCESS, run.seed, loaded.encoder, loaded.train, run.batch.prompts, (), True)
    batch = next(given_texts(job.source.factory, job.source.options).epoch(context))
    for ids, trains in zip(batch["tokens", "input_ids"], batch["response_mask"], strict=True):
        answer = loaded.tokenizer.decode(ids[trains])
        assert f"{loaded.tokenizer.decode(ids[~trains])}⟦{answer}⟧\n" in said


def test_the_answers_of_a_conversation(shown, tiny, tmp_path):
    messages = [{"role": role, "content": text} for role, text in zip("uaua", "1234", strict=True)]
    for message in messages:
        message["role"] = {"u": "user", "a": "assistant"}[message["role"]]
    said = shown(config=conversations(tiny, tmp_path, messages))
    assert "u:1;a:⟦2<eos>⟧u:3;a:⟦4<eos>⟧" in said
    assert "row 1: 16 tokens, 4 train" in said and "answers that train    2   2.0    2" in said
    last = shown(config=conversations(tiny, tmp_path, messages, train_on="last"))
    assert "u:1;a:2<eos>u:3;a:⟦4<eos>⟧" in last


def test_rows_that_do_not_fit_are_counted_and_then_refused(shown):
    with pytest.raises(ValueError, match=r"data\.train: row 1: the row has 18 tokens, over the model's context of 17"):
        shown("algorithm=sft", "actor.model_config.max_position_embeddings=17", "rollout.max_new_tokens=2")
    assert "0 of 64 rows fit into the model's context of 17 tokens." in shown.said


def test_rows_that_fill_the_last_batch_are_counted_and_shown_once(shown):
    said = shown("algorithm=sft", "data.train.count=9", "batch.prompts=8", "inspect.rows=12", "warmup=none")
    assert said.count("\nrow ") == 9 and "row 9: " in said
    assert "9 of 9 rows fit into the model's context of 128 tokens." in said


@pytest.mark.parametrize(
    ("algorithm", "parts"), [("dpo", ["chosen", "rejected"]), ("kto", ["", "mismatched"])], ids=["pairs", "labels"]
)
def test_the_texts_of_a_row_are_told_apart_and_the_row_counts_once(algorithm, parts, shown):
    said = shown(f"algorithm={algorithm}", "data.train.count=5", "batch.prompts=4", "inspect.rows=5", "warmup=none")
    titles = [line.split(":")[0] for line in said.splitlines() if line.startswith("row ")]
    assert titles == [f"row {n}{part and ', '}{part}" for n in range(1, 6) for part in parts]
    assert "5 of 5 rows fit into the model's context of 128 tokens." in said
    if algorithm == "dpo":
        digits, answers = zip(*(re.findall(r"([0-9]+)=⟦(.+)<eos>⟧", said)), strict=True)
        assert [digits[::-1] for digits in digits[::2]] == list(answers[::2])
        assert digits[1::2] == answers[1::2]


def test_a_conversation_that_cannot_train_is_refused_once_and_by_name(shown, tiny, tmp_path):
    config = conversations(tiny, tmp_path, [{"role": "user", "content": "1"}])
    with pytest.raises(ValueError) as caught:
        shown(config=config)
    assert (
        re.fullmatch(r"data\.train: .*rows\.jsonl line 1: data\.template=.*", str(caught.value))
        and str(caught.value).count("no message is an answer") == 1
    )


def test_an_end_at_which_no_sampling_ends_is_noted(shown, tiny, tmp_path):
    """That of plain answers is one, whatever the tokenizer's is."""
    config = conversations(tiny, tmp_path, [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])
    assert "Answers end with" not in shown(config=config)
    (tmp_path / "chat.jinja").write_text(CHAT.replace("eos_token", "pad_token"))
    assert "⟦2<pad>⟧" in (said := shown(config=config)) and "Answers end with" not in said
    ends = "(((m.tool_calls[0].function.arguments.x or '') + pad_token if m.tool_calls else eos_token)"
    function = {"name": "f", "arguments": {"x": "3"}}
    called = {"role": "assistant", "content": "2", "tool_calls": [{"type": "function", "function": function}]}
    config = conversations(tiny, tmp_path, [{"role": "user", "content": "1"}, called])
    (tmp_path / "chat.jinja").write_text(CHAT.replace("(eos_token", ends))
    assert "⟦23<pad>⟧" in (said := shown(config=config)) and "Answers end with" not in said
    config = conversations(tiny, tmp_path, [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}])
    (tmp_path / "chat.jinja").write_text(CHAT.replace("eos_token", "(pad_token if m.content == '2' else eos_token)"))
    assert "Answers end with '<pad>', not with the tokenizer's end token '<eos>'" in shown(config=config)


def test_colours_say_what_trains_and_what_is_special():
    tokenizer = characters(alphabet="ab")
    ids = tokenizer.convert_tokens_to_ids(["a", "b", "<pad>", "a", "<eos>"])
    example = Example(ids, [False, True, True, False, True], 1, "")
    text = spelled(example, tokenizer, "")
    assert text.plain == "ab<pad>a<eos>"
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("a", READ), ("b", TRAINED), ("<pad>", f"{TRAINED} {SPECIAL}"), ("a", READ), ("<eos>", f"{TRAINED} {SPECIAL}")
    ]  # fmt: skip
    assert spelled(example, tokenizer, "[]").plain == "a[b<pad>]a[<eos>]"


def test_no_rows_are_nothing_to_show(tiny):
    with pytest.raises(ValueError, match=r"inspect\.rows=0: it must be at least 1"):
        Job(tiny("inspect.rows=0"))
