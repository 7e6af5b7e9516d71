"""Rows of text files stay in the file: what is in memory, and what happens when the file changes."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from rft.data.rows.sources import FileRows
from rft.data.rows.text_files import OPEN_FILES

ROWS = [{"prompt": f"é {number}\n", "answer": None if number == 1 else str(number)} for number in range(4)]
MARK = b"\xef\xbb\xbf"
LINES = b"\n".join(json.dumps(row).encode() for row in ROWS)
UNICODE = b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in ROWS)
CELLS = '"é 0\n",0\r\n"é 1\n",\n\n"é 2\n",2\n"é 3\n",3'.encode()


def load(path, *required, limit=None):
    return FileRows(str(path), {}, None, limit, "data.train").load(required)


@pytest.mark.parametrize(
    ("ending", "data"),
    [
        ("jsonl", LINES),
        ("jsonl", MARK + UNICODE + b"\n"),
        ("jsonl", b"\r\n \t\r\n" + LINES.replace(b"\n", b"\r\n\r\n")),
        ("json", MARK + b" [ " + UNICODE.replace(b"\n", b"\n , ") + b" ] \n"),
        ("json", json.dumps(ROWS, indent=2).encode()),
        ("json", MARK + LINES),
        ("csv", MARK + b"prompt,answer\r\n" + CELLS),
        ("csv", b"prompt,answer\r" + CELLS.replace(b"\n\n", b"\r")),
    ],
)
def test_a_row_is_the_same_in_any_order(tmp_path, ending, data):
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(data)
    rows = load(path)
    assert [rows[number] for number in (3, 0, 2, 1)] == [ROWS[number] for number in (3, 0, 2, 1)]
    assert list(load(path, limit=2)) == ROWS[:2] and rows[0] is not rows[0]


def test_little_of_a_row_is_in_memory(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p" * 500, "answer": str(number)}) + "\n" for number in range(1000)))
    load(path, limit=1)
    tracemalloc.start()
    rows = load(path, "prompt", "answer")
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 1000 and held < 60 * 1000, "the file has 500 kB"


def test_a_change_of_a_row_is_noticed_and_others_are_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINES + b"\n")
    rows = load(path)
    with path.open("ab") as file:  # another program appends rows
        file.write(b'{"prompt": "more"}\n')
    os.utime(path, (1, 1))
    assert list(rows) == ROWS
    with path.open("r+b") as file:
        file.write(LINES.replace(b"2", b"7"))
    assert rows[0] == ROWS[0]
    with pytest.raises(ValueError, match=r"rows\.jsonl line 3: the row has changed since the run began; restore the"):
        rows[2]
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"rows\.jsonl line 1: the row has changed since the run began"):
        rows[0]


def test_a_file_that_another_one_replaces_is_read_on(tmp_path):
    path, other = tmp_path / "rows.jsonl", tmp_path / "other.jsonl"
    path.write_bytes(LINES)
    other.write_bytes(LINES.replace(b"3", b"7"))
    for file in (path, other):
        os.utime(file, (1, 1))
    rows = load(path)
    assert rows[0] == ROWS[0]
    other.replace(path)
    assert rows[3] == ROWS[3] and load(path)[3]["answer"] == "7"


def test_more_files_than_are_held_open(tmp_path):
    for number in range(OPEN_FILES + 2):
        (tmp_path / f"{number:03}.jsonl").write_bytes(b'{"prompt": "%d"}' % number)
    rows = load(tmp_path / "*.jsonl")
    assert [row["prompt"] for row in [*rows, rows[0]]] == [*map(str, range(OPEN_FILES + 2)), "0"]
    (tmp_path / "001.jsonl").unlink()
    assert [rows[0] for _ in range(2)] and rows[6]["prompt"] == "6"
    with pytest.raises(ValueError, match=r"001\.jsonl line 1: the file cannot be read again .*; restore it"):
        rows[1]


@pytest.mark.slow
def test_built_in_rows_and_files_of_text_need_no_pyarrow(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(LINES)
    work = (
        "import sys\n"
        "from rft.data.rows.sources import FileRows\n"
        "from rft.data.rows.symbolic import Symbolic\n"
        "assert len(FileRows(sys.argv[1], {}, None, None, 'data.train').load(['prompt'])) == 4\n"
        "assert len(Symbolic('data.train', 'add', 'train', 3, [4, 4], 0.0, 0).load(['prompt'])) == 3\n"
        "assert not {'pyarrow', 'datasets', 'pandas'} & {*sys.modules}, sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", work, str(tmp_path / "rows.jsonl")], check=True)
