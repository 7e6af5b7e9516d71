"""Files of which a part is wrong: rows, or one line that names the file; never another exception."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rft.data.rows.sources import LONGEST, FileRows

FIELDS = ("prompt", "response", "answer")
ROWS = [
    {"prompt": "é?", "response": "\U0001f600", "answer": 7, "tags": [1.5, {"a": None}]},
    {"prompt": [{"role": "user", "content": "1+1"}], "response": "2", "answer": "2"},
]


def text_of(ending: str) -> bytes:
    if ending == "csv":
        table = io.StringIO()
        writer = csv.writer(table)
        writer.writerows([FIELDS, ["é, ?", 'a "b"\nc', "7"], ["p", "r", "2"]])
        return table.getvalue().encode()
    return (json.dumps(ROWS) if ending == "json" else "\n".join(map(json.dumps, ROWS))).encode()


def read(path: Path, data: bytes) -> list[dict[str, Any]] | str:
    """The rows of a file, or the message about it."""
    path.write_bytes(data)
    try:
        return list(FileRows(str(path), {}, None, None, "data.train").load(FIELDS))
    except (ValueError, OSError) as error:
        return str(error)


def deep(levels: int) -> bytes:
    return b'{"prompt": "p", "response": "r", "answer": ' + b"[" * levels + b"]" * levels + b"}"


PLACES = st.integers(0, 200)
BYTES = st.sampled_from(
    [
        b"",
        b"\0",
        b"\xff",
        b'"',
        b"\\",
        b"{",
        b"]",
        b",",
        b"\n",
        b"\t",
        b": ",
        b"\\ud800",
        b"NaN",
        b"&a *a",
        b"!x ",
        b"- ",
    ]
)
CHANGES = st.lists(st.tuples(PLACES, st.integers(0, 3), BYTES), min_size=1, max_size=3)


def damaged(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """The bytes after some were cut out and others put in."""
    for place, cut, put in changes:
        place = min(place, len(data))
        data = data[:place] + put + data[place + cut :]
    return data


RANDOM = settings(
    deadline=None, max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@RANDOM
@given(ending=st.sampled_from(["jsonl", "json", "csv"]), changes=CHANGES)
@example(ending="json", changes=[(40, 1000, b"")])
@example(ending="jsonl", changes=[(0, 1000, deep(100_000))])
@example(ending="jsonl", changes=[(0, 1000, b"")])
@example(ending="csv", changes=[(0, 0, b"\xff\xfe")])
def test_a_damaged_file_gives_rows_or_one_line_with_its_name(
    ending: str, changes: list[tuple[int, int, bytes]], tmp_path: Path
) -> None:
    path = tmp_path / f"rows.{ending}"
    found = read(path, damaged(text_of(ending), changes))
    if isinstance(found, str):
        assert str(path) in found and "\n" not in found
    else:
        assert all(isinstance(row["prompt"], str | list) and row["answer"] is not None for row in found)
        json.dumps(found, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (deep(100_000), "lists and objects are nested more than 64 levels deep"),
        (deep(70), "lists and objects are nested more than 64 levels deep"),
        (
            rb'{"prompt": "a\ud800b", "response": "r", "answer": 1}',
            r"half of a surrogate pair, \ud800, is no character",
        ),
        (
            b'{"prompt": "p", "prompt": "q", "response": "r", "answer": 1}',
            "the key 'prompt' occurs twice in one object",
        ),
        (
            b'{"prompt": "p", "response": "r", "answer": ' + b"1" * 400 + b"}",
            "a number of 400 digits; write it as a text",
        ),
        (b'{"prompt": "p", "response": "r", "answer": ' + b"1" * 5000 + b"}", "a number of 5,000 digits"),
        (
            b'{"prompt": "p", "response": "r", "answer": NaN}',
            "the field 'answer' is nan, as tables write a missing value",
        ),
        (b'{"prompt": "p\0", "response": "r", "answer": 1}', "not JSON (Invalid control character"),
        (b'{"prompt": "p\xe9", "response": "r", "answer": 1}', "not UTF-8 (byte 0xe9); save the file in UTF-8"),
        (b'{"prompt": "p", "response": "r', "not JSON (Unterminated string"),
        (
            b'{"prompt": 5, "response": "r", "answer": 1}',
            "the field 'prompt' is int, not text or a list of chat messages",
        ),
        (b'{"prompt": "p", "response": {"a": 1}, "answer": 1}', "the field 'response' is dict, not text"),
        (b'{"prompt": [1, 2], "response": "r", "answer": 1}', "message 0 of the field 'prompt' is 1; expected {role"),
        (b'{"prompt": " ", "response": "r", "answer": 1}', "the field 'prompt' is empty; remove the row"),
        (b'{"prompt": "p", "response": "", "answer": 1}', "the field 'response' is empty; remove the row"),
        (b'{"prompt": "p", "response": [], "answer": 1}', "the field 'response' is empty; remove the row"),
        (
            b'{"prompt": "p", "response": [{"role": "assistant", "content": ""}], "answer": 1}',
            "the field 'response' is empty",
        ),
        (
            b'{"prompt": "' + b"x" * (LONGEST + 1) + b'", "response": "r", "answer": 1}',
            "the field 'prompt' has 5,000,001 characters, over 5,000,000",
        ),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_what_is_wrong_in_a_row_is_named_with_its_place(ending: str, row: bytes, message: str, tmp_path: Path) -> None:
    good = b'{"prompt": "p", "response": "r", "answer": 1}'
    data = good + b"\n" + row if ending == "jsonl" else b"[" + good + b", " + row + b"]"
    found = read(tmp_path / f"rows.{ending}", data)
    if ending == "json" and message.startswith("not UTF-8"):  # the reader decodes the whole file before it splits rows
        assert found == f"{tmp_path / 'rows.json'}: {message}"
    else:
        assert isinstance(found, str) and found.startswith(
            f"{tmp_path / 'rows'}.{ending} {'line' if ending == 'jsonl' else 'row'} 2: {message}"
        )


def test_numbers_and_nesting_within_the_limits_and_digits_in_a_text(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "response": "1" * 400, "answer": 10**307}, {"prompt": "p", "response": "r", "answer": -1}]
    assert read(tmp_path / "rows.jsonl", "\n".join(map(json.dumps, rows)).encode()) == rows
    assert read(tmp_path / "rows.json", json.dumps(rows).encode()) == rows
    assert isinstance(read(tmp_path / "rows.jsonl", deep(60)), list)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"prompt,response,answer\np,r,1\np,\0,1\n", "line 3: not csv in UTF-8 (a NUL byte)"),
        (b"prompt,response,answer\np,r,1\np,\xe9,1\n", "line 3: not UTF-8 (byte 0xe9); save the file in UTF-8"),
        (b'prompt,response,answer\np,r,1\np,"r,1\np,r,1\n', "line 3: not csv in UTF-8 (unexpected end of data); close"),
        (b"prompt,prompt,response,answer\na,b,r,1\n", "line 1: the field 'prompt' is named twice; rename one"),
        (b"prompt,response,answer\np,r\n", "line 2: 2 cells, but line 1 names 3 fields"),
    ],
)
def test_what_is_wrong_in_a_csv_file_is_named_with_its_line(data: bytes, message: str, tmp_path: Path) -> None:
    found = read(tmp_path / "rows.csv", data)
    assert isinstance(found, str) and found.startswith(f"{tmp_path / 'rows.csv'} {message}")


def test_the_worse_answer_may_be_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"chosen": "a", "rejected": "", "completion": ""}\n')
    rows = FileRows(str(path), {}, None, None, "data.train")
    assert len(rows.load(["chosen", "rejected", "completion"])) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_parquet_file_is_named_in_one_line(stream: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    path = tmp_path / "rows.parquet"
    text = "p" * 40
    parquet.write_table(pyarrow.table({"prompt": [text]}), path, compression="none")
    whole, rows = path.read_bytes(), FileRows(str(path), {}, None, None, "data.train")
    for data in (whole[: len(whole) // 2], whole[:-40] + b"\0" * 40, whole.replace(text.encode(), b"\xff" * 40)):
        path.write_bytes(data)
        with pytest.raises(
            ValueError, match=r"^[^\n]*rows\.parquet[^\n]*: not a parquet file that can be read [^\n]*$"
        ):
            rows.stream(["prompt"]).preview() if stream else rows.load(["prompt"])
