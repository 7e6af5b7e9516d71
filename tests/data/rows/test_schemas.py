"""Rows of other people's formats, as their files have them, become rows of the project."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from rft.data.encode.tokenizer import characters
from rft.data.rows.sources import FileRows
from rft.setup.assembly import Job

ROLES = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool"}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% else %}]{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[a:{% endif %}"
)


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "be kind"}


def converted(folder: Path, rows: list[dict[str, Any]], **schema: Any) -> list[dict[str, Any]]:
    """What becomes of rows in a parquet file and in a jsonl file, which is the same."""
    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, again = (
        list(FileRows(str(folder / f"rows.{ending}"), {}, schema, None, "data.train").load([]))
        for ending in ("parquet", "jsonl")
    )
    for one, other in zip(found, again, strict=True):
        assert {name: value for name, value in one.items() if value is not None} == other
    return again


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"messages": [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d")]},
            {"prompt": [SYSTEM, user("a"), assistant("b"), user("c")], "response": [assistant("d")]},
        ),
        ({"messages": [user("a"), assistant("b"), user("c")]}, {"prompt": [user("a"), assistant("b"), user("c")]}),
        ({"prompt": "sky is", "completion": " blue"}, {"response": " blue"}),
        ({"prompt": [user("a")], "completion": [assistant("b")], "label": True}, {"response": [assistant("b")]}),
        ({"prompt": "sky is", "chosen": " blue", "rejected": " green"}, {}),
        (
            {"chosen": "the sky is grey", "rejected": "the sky is green"},
            {"prompt": "the sky is", "chosen": " grey", "rejected": " green"},
        ),
        ({"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]}, {}),
        (
            {"chosen": [SYSTEM, user("a"), assistant("b")], "rejected": [SYSTEM, user("a"), assistant("c")]},
            {"prompt": [SYSTEM, user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]},
        ),
        (  # the prompt is there as a text, and in both of the pair
            {"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]},
            {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]},
        ),
        (  # both say the same once, and part at their second answer
            {
                "chosen": [user("a"), assistant("b"), user("c"), assistant("d")],
                "rejected": [user("a"), assistant("b"), user("c"), assistant("e")],
            },
            {
                "prompt": [user("a"), assistant("b"), user("c")],
                "chosen": [assistant("d")],
                "rejected": [assistant("e")],
            },
        ),
        (  # equal answers are still answers
            {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("b")]},
            {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("b")]},
        ),
    ],
)
def test_messages(row: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    [found] = converted(tmp_path, [row], name="messages")
    assert found == row | expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [SYSTEM, assistant("b")]}, "no message before the assistant's answer is of another role"),
        ({"messages": []}, "messages: expected a list of chat messages"),
        ({"messages": "hello"}, "messages: expected a list of chat messages .* got 'hello'"),
        ({"chosen": "blue", "rejected": "green"}, "begin with different words, and there is no prompt"),
        ({"chosen": "blue", "rejected": [assistant("b")]}, "chosen: expected a list of chat messages"),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("x"), assistant("b")]},
            "chosen and rejected are not answers to the same messages",
        ),
        (
            {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")], "rejected": [user("a"), user("b")]},
            "chosen and rejected are not answers to the same messages",
        ),
        ({"chosen": [assistant("b")], "rejected": [assistant("c")]}, "not answers to the same messages"),
    ],
)
def test_messages_that_are_none(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    rows = FileRows(str(tmp_path / "rows.jsonl"), {}, {"name": "messages"}, None, "data.train")
    with pytest.raises(ValueError, match=rf"rows\.jsonl line 1: .*{message}.*; see data\.train\.schema"):
        rows.load([])


def test_sharegpt(tmp_path: Path) -> None:
    asked, said = {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}
    rows = [
        {"id": "1", "conversations": [asked, said, {"from": "observation", "value": "c"}, said], "system": "be kind"},
        {"id": "2", "conversations": [{"from": "system", "value": "be kind"}, asked], "system": ""},
        {"id": "3", "conversations": [asked], "chosen": said, "rejected": {"from": "gpt", "value": "c"}},
    ]
    tool = {"role": "tool", "content": "c"}
    first, second, third = (converted(tmp_path, [row], name="sharegpt", roles=ROLES)[0] for row in rows)
    before, after = [SYSTEM, user("a"), assistant("b"), tool], [assistant("b")]
    assert first == {"id": "1", "messages": before + after, "prompt": before, "response": after}
    assert second == {"id": "2", "messages": [SYSTEM, user("a")], "prompt": [SYSTEM, user("a")]}
    pair = {"chosen": [assistant("b")], "rejected": [assistant("c")]}
    assert third == {"id": "3", "prompt": [user("a")], **pair}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"from": "bing", "value": "x"}], "from one of human, gpt, system, observation; got {'from': 'bing'"),
        ([{"role": "user", "content": "x"}], "expected turns {from, value}"),
        ([], "expected a list of turns"),
        ([{"from": "gpt", "value": "x"}], "no message before the assistant's answer"),
    ],
)
def test_sharegpt_that_is_none(turns: list[dict[str, str]], message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"conversations": turns}]))
    rows = FileRows(str(tmp_path / "rows.json"), {}, {"name": "sharegpt", "roles": ROLES}, None, "data.train")
    with pytest.raises(ValueError, match=rf"rows\.json row 1: .*{message}.*; see data\.train\.schema"):
        rows.load([])


# The rows of a format as its files have them, with the ending that is usual, what trains of each, and the options that
# a run on them needs.
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [user("3+4")],
    "ability": "math",
    "reward_model": {"ground_truth": "7", "style": "rule"},
    "extra_info": {"answer": "3+4=7", "index": 0, "question": "3+4", "split": "train"},
}
FORMATS = {
    "verl": ("parquet", [VERL], ["+data.train.columns.response=extra_info.answer"], ["3+4=7<eos>"]),
    "openrlhf": ("jsonl", [{"input": "1+1", "output": "2", "answer": "2"}], [], ["2<eos>"]),
    "trl": ("parquet", [{"messages": [user("1+1"), assistant("2")], "answer": "2"}], [], ["2<eos>"]),
    "trl as pairs": (
        "parquet",
        [{"chosen": [user("1+1"), assistant("2")], "rejected": [user("1+1"), assistant("3")], "answer": "2"}],
        ["algorithm/source=pairs", "algorithm/loss=dpo", "algorithm/aggregation=none"],
        ["2<eos>", "3<eos>"],
    ),
    "sharegpt": (
        "json",
        [
            {
                "conversations": [
                    {"from": "human", "value": "1+1"},
                    {"from": "gpt", "value": "2"},
                    {"from": "human", "value": "more"},
                    {"from": "gpt", "value": "3"},
                ],
                "answer": "2",
            }
        ],
        [],
        ["2<eos>3<eos>"],
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_reads_the_format(name: str, tmp_path: Path, resolved) -> None:
    ending, rows, options, trained = FORMATS[name]
    held_out = json.loads(json.dumps(rows).replace("1+1", "2+0").replace("3+4", "4+3"))
    for part, some in (("train", rows), ("test", held_out)):
        path = tmp_path / f"{part}.{ending}"
        if ending == "parquet":
            datasets.Dataset.from_list(some).to_parquet(path)
        else:
            path.write_text(json.dumps(some) if ending == "json" else "\n".join(map(json.dumps, some)))
    words = characters(alphabet="abcdefghijklmnopqrstuvwxyz0123456789[]:+= ")
    words.chat_template = TEMPLATE
    words.save_pretrained(tmp_path / "words")
    job = Job(
        resolved(
            "algorithm=sft",
            f"data={name.split()[0]}",
            f"data.train.path={tmp_path / 'train'}.{ending}",
            f"data.eval.heldout.path={tmp_path / 'test'}.{ending}",
            "data.max_response_tokens=16",
            "actor/tokenizer=pretrained",
            f"actor.tokenizer.path={tmp_path / 'words'}",
            *options,
        )
    )
    loaded = job.load(1)
    job.check.end()
    row = loaded.train[0]
    assert row["answer"] == ("7" if name == "verl" else "2") == loaded.held_out["heldout"][0]["answer"]
    fields = ("chosen", "rejected") if "pairs" in name else ("response",)
    assert set(fields) <= job.needs
    for field, expected in zip(fields, trained, strict=True):
        ids, trains = loaded.encoder.example(row | {"response": row[field]})
        text = loaded.tokenizer.decode([token for token, flag in zip(ids, trains, strict=True) if flag])
        assert text == expected
        assert loaded.tokenizer.decode(ids).startswith("[u:3+4][a:" if name == "verl" else "[u:1+1][a:")
