"""What is wrong with all rows together, or with the answers in them, is known before a model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from rft.data.row_checks import check_held_out, check_rows, refuse_agents
from rft.data.rows.lazy import LazyRows
from rft.distributed import SINGLE_PROCESS
from rft.setup.assembly import Job

TRAIN = [{"prompt": f"{n}=", "answer": "1"} for n in range(6)]


def compared(train: Any, *fields: str, **sets: Any) -> tuple[list[str], list[str]]:
    """The messages that refuse, and those that warn."""
    warned: list[str] = []
    return list(check_held_out(train, sets, fields or ("prompt",), SINGLE_PROCESS, warned.append)), warned


def test_a_set_of_which_all_rows_train_is_refused_and_one_with_some_is_noted() -> None:
    other = [{"prompt": f"{n}+"} for n in range(3)]
    refused, warned = compared(TRAIN, same=TRAIN[::-2], some=[*TRAIN[:1], *other], apart=other)
    [message], [note] = refused, warned
    assert message.startswith("data.eval.same: all of its 3 rows are in data.train (compared by prompt), so nothing is")
    assert note.startswith("data.eval.some: 1 of its 4 rows are in data.train (compared by prompt)")


def test_the_message_about_a_row_counts_the_others_that_fail() -> None:
    def check(row: Any) -> None:
        if row["answer"] != "1":
            raise ValueError(f"{row['answer']} is not 1")

    rows = [{"answer": str(number % 2)} for number in range(20)]
    check_rows(rows[1::2], check)
    with pytest.raises(ValueError, match=r"^row 1: 0 is not 1$"):
        check_rows(rows[:2], check)
    said = r"^row 1: 0 is not 1 \(other rows that fail: 9, the first at row 3, row 5, row 7, row 9, row 11\)$"
    with pytest.raises(ValueError, match=said):
        check_rows(rows, check)


def test_messages_of_one_user_and_white_space_are_the_same_prompt_as_the_text() -> None:
    asked = [{"prompt": [{"role": "user", "content": " 1="}]}]
    assert len(compared(LazyRows(6, lambda number: TRAIN[number]), chats=asked)[0]) == 1
    assert compared(TRAIN, chats=[{"prompt": [{"role": "system", "content": "1="}]}]) == ([], [])


def test_pairs_are_compared_with_their_answers_and_texts_without_prompts_are_not() -> None:
    train = [{"prompt": "p", "chosen": "a", "rejected": "b"}]
    fields = ("prompt", "chosen", "rejected")
    assert compared(train, *fields, other=[{"prompt": "p", "chosen": "c", "rejected": "b"}]) == ([], [])
    assert len(compared(train, *fields, same=[dict(train[0])])[0]) == 1
    assert compared([{"messages": []}], same=TRAIN) == ([], [])


def test_every_rank_compares_its_share_and_gives_the_same_message(ranks) -> None:
    def work(world: Any) -> list[str]:
        return list(check_held_out(TRAIN, {"same": TRAIN[1:3]}, ["prompt"], world, lambda message: None))

    first, second = ranks(2, work)
    assert first == second and len(first) == 1


def config_of(tiny: Any, folder: Path, train: list[Any], held_out: list[Any], *overrides: str) -> dict[str, Any]:
    """A run on two files."""
    config: dict[str, Any] = tiny(*overrides)
    node = {"_target_": "rft.data.rows.sources.FileRows", "columns": {}, "schema": None, "limit": None}
    for name, rows in (("train", train), ("test", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config["data"]["train"] = node | {"path": str(folder / "train.jsonl")}
    config["data"]["eval"] = {"heldout": node | {"path": str(folder / "test.jsonl")}}
    return config


def messages(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    job = Job(config)
    loaded = job.load(1)
    return job.check.messages, loaded.messages


def test_a_run_on_the_rows_of_its_held_out_set_is_refused(tiny, tmp_path: Path) -> None:
    refused, _ = messages(config_of(tiny, tmp_path, TRAIN, TRAIN[:2], "warmup=none"))
    assert len(refused) == 1 and refused[0].startswith("data.eval.heldout: all of its 2 rows are in data.train")


def test_fewer_rows_than_a_step_has_prompts_are_noted_with_both_numbers(tiny, tmp_path: Path) -> None:
    held_out = [{"prompt": "9=", "answer": "1"}]
    found = messages(config_of(tiny, tmp_path, TRAIN, held_out, "warmup=none", "batch.prompts=8"))
    assert found == ([], ["data.train has 6 rows, fewer than batch.prompts=8: rows repeat within a step"])
    assert messages(config_of(tiny, tmp_path, TRAIN, held_out, "warmup=none", "batch.prompts=6")) == ([], [])


def test_the_built_in_data_is_silent(tiny) -> None:
    assert messages(tiny()) == ([], [])


@pytest.mark.parametrize(
    ("reward", "answer", "message"),
    [
        ("exact_match", " ", "the field 'answer' is empty, so no answer is right; write one, or remove the row"),
        ("exact_match", ["1"], "the field 'answer' is a list, which no response equals; write a text"),
        ("gsm8k", "seven", "the field 'answer' holds no number behind ####: 'seven'"),
        ("choice", "7", "the field 'answer' is none of the letters ABCD"),
        ("verdict", "", "the field 'answer' is empty"),
        ("overlap", "The", "the field 'answer' has no word besides articles and punctuation: 'The'"),
        ("tool_call", "time()", "the field 'answer' is not JSON"),
    ],
)
def test_an_answer_that_no_response_can_match_is_refused_in_both_sets(reward, answer, message, tiny, tmp_path) -> None:
    good = {"gsm8k": "7", "choice": "A", "tool_call": "[]"}.get(reward, "yes")
    rows = [[{"prompt": p, "answer": good}, {"prompt": p * 2, "answer": answer}] for p in ("1", "2")]
    overrides = (f"reward/terms=[{reward},format]", f"reward.accuracy={reward}", "warmup=none", "batch.prompts=2")
    refused, _ = messages(config_of(tiny, tmp_path, *rows, *overrides))
    assert [text.split(": ", 1)[0] for text in refused] == [
        f"{tmp_path / name}.jsonl line 2" for name in ("train", "test")
    ]
    assert all(text.split(": ", 1)[1].startswith(message) for text in refused)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"agent_name": "tool_agent"}, "agent_name"),
        ({"tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}}, "tools_kwargs"),
        ({"extra_info": {"tools_kwargs": {"calc": {}}}}, "tools_kwargs"),
        ({"extra_info": {"interaction_kwargs": {"name": "tutor"}}}, "interaction_kwargs"),
    ],
)
def test_a_row_for_an_agent_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^the field '{field}' asks for tools .*; choose an environment, or remove the"
    ):
        refuse_agents({"prompt": "p"} | fields)
    refuse_agents({"prompt": "p", "agent_name": "single_turn_agent", "extra_info": {"index": 0}})
