"""Rows of files of every format, by one class."""

import csv
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from rft.data.rows.lazy import ConcatRows, LazyRows
from rft.data.rows.sources import FileRows

ROWS = [{"prompt": f"é,\n{n}", "answer": f"0{n}", "more": {"gold": str(n), "deep": {"er": n}}} for n in range(5)]


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0].keys())
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(path: Any, *required: str, limit: int | None = None, **columns: str | None) -> Any:
    return FileRows(path, columns, None, limit, "data.train").load(required)


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet"])
def test_every_format_gives_the_same_rows(ending: str, tmp_path: Path) -> None:
    rows = load(write(tmp_path / f"rows.{ending}", ROWS), "prompt", gold="more.gold", er="more.deep.er")
    assert list(rows) == [row | {"gold": str(n), "er": n} for n, row in enumerate(ROWS)]
    assert len(rows) == 5
    assert rows[3]["gold"] == "3" and rows[-1] == rows[4] and rows[1:3] == [rows[1], rows[2]]


def test_cells_of_a_csv_file_are_text_and_null_where_empty(tmp_path: Path) -> None:
    rows = [{"prompt": "two\nlines, quoted", "answer": "0123", "note": ""}, {"prompt": "NA", "answer": "1e3"}]
    path = write(tmp_path / "rows.csv", rows)
    assert list(load(path, "prompt", "answer")) == [rows[0] | {"note": None}, rows[1] | {"note": None}]
    with pytest.raises(ValueError, match=r"rows\.csv line 3: the field 'note' is null"):  # line 2 and 3 are one row
        load(path, "note")


def test_a_json_file_may_have_an_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    assert list(load(str(path))) == ROWS


def test_patterns_and_lists_of_files_are_read_in_order(tmp_path: Path) -> None:
    for name, rows in (("b.parquet", ROWS[2:4]), ("a.parquet", ROWS[:2]), ("c.jsonl", ROWS[4:])):
        write(tmp_path / name, rows)
    assert list(load(str(tmp_path / "*.parquet"))) == ROWS[:4]
    paths = [str(tmp_path / "c.jsonl"), str(tmp_path / "?.parquet")]
    rows = load(paths)
    assert list(rows) == ROWS[4:] + ROWS[:4] and rows[-1] == ROWS[3] and rows[0] == ROWS[4]
    assert [list(load(paths, limit=limit)) for limit in (1, 2, 3)] == [(ROWS[4:] + ROWS[:4])[:n] for n in (1, 2, 3)]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    assert list(load(write(tmp_path / "rows[1].jsonl", ROWS))) == ROWS


def test_rows_of_tables_stay_on_disk_and_lose_the_nulls_that_fill_structs(tmp_path: Path) -> None:
    turns = [[{"role": "user", "content": "q"}], [{"role": "tool", "content": None, "name": "add"}]]
    rows = load(write(tmp_path / "rows.parquet", [{"prompt": turn, "note": None} for turn in turns]), "prompt")
    assert isinstance(rows, LazyRows)
    assert rows[0] == {"prompt": [{"role": "user", "content": "q"}], "note": None}
    assert rows[1]["prompt"] == [{"role": "tool", "name": "add"}]
    assert rows[0] is not rows[0]


@pytest.mark.parametrize(
    ("ending", "where"), [("jsonl", "line 3"), ("json", "row 3"), ("parquet", "row 3"), ("csv", "line 4")]
)
def test_a_bad_row_is_named_in_every_format(ending: str, where: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a\nb" if n == 0 else "p", "answer": None if n == 2 else "1"} for n in range(4)]
    path = write(tmp_path / f"rows.{ending}", rows)
    where = where if ending != "csv" else "line 5"  # the first row has two lines, the names have one
    with pytest.raises(ValueError, match=rf"rows\.{ending} {where}: the field 'answer' is null; name it with"):
        load(path, "answer")
    with pytest.raises(ValueError, match=r"the field 'answer' is null; set data\.train\.columns\.gold to its name"):
        load(path, "gold", gold="answer")
    assert load(path, gold="answer")[2]["gold"] is None  # nobody needs it


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"gold": "more.glod"},
            r"no field 'more\.glod' \(known: gold, deep; did you mean gold\?\); set data\.train\.col",
        ),
        ({"gold": "mor.gold"}, r"no field 'mor\.gold' \(known: prompt, answer, more; did you mean more\?\)"),
        ({"gold": "answer.gold"}, r"no field 'answer\.gold' \(the value before 'gold' has no fields\)"),
        ({"gold": "gold"}, r"no field 'gold'.*set data\.train\.columns\.gold to its name, or to null"),
    ],
)
def test_a_column_that_leads_nowhere(columns: dict[str, str], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"rows\.jsonl line 1: " + message):
        load(path, **columns)


def test_a_column_can_be_taken_out_and_a_dotted_name_may_be_a_field(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"a.b": 1, "a": {"b": 2}}])
    assert load(path, response=None, first="a.b")[0] == {"a.b": 1, "a": {"b": 2}, "first": 1}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "rows.txt",
            "x",
            r"data\.train\.path=.*rows\.txt: the extension gives the format .* \.jsonl, \.json, \.csv, \.par",
        ),
        ("rows.json", "[1]", r"rows\.json row 1: expected a JSON object, got int"),
        ("rows.json", '[{"a": 1}', r"rows\.json row 1: not JSON .* expected a list of objects"),
        ("rows.json", "[]", r"data\.train\.path: .*rows\.json holds no rows"),
        ("rows.csv", "", r"data\.train\.path: .*rows\.csv holds no rows"),
        ("rows.csv", "a,b\n1\n", r"rows\.csv line 2: 1 cells, but line 1 names 2 fields"),
        ("rows.csv", 'a,b\n1,"2"x\n', r"rows\.csv line 2: not csv in UTF-8"),
        ("rows.parquet", "hello", r"data\.train\.path=.*rows\.parquet: not a parquet file that can be read"),
    ],
)
def test_bad_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path / name))


def test_paths_that_name_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.train\.path=.*x-\*\.jsonl: no file matches this pattern"):
        load(str(tmp_path / "x-*.jsonl"))
    with pytest.raises(ValueError, match=r"data\.train\.path=\[\]: give the path of a file"):
        load([])
    with pytest.raises(
        ValueError, match=r"data\.train\.schema\.name: no schema is called 'message'; did you mean mess"
    ):
        FileRows("x", {}, {"name": "message"}, None, "data.train")


def test_long_cells_and_csv_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("\ufeffprompt\n" + "x" * 200_000 + "\n\n")
    assert [len(row["prompt"]) for row in load(str(tmp_path / "rows.csv"), "prompt")] == [200_000]


def test_rows_by_number() -> None:
    rows = ConcatRows([[{"n": 0}], LazyRows(2, lambda number: {"n": number + 1}), [{"n": 3}]])
    assert [row["n"] for row in rows] == [0, 1, 2, 3] == [rows[n]["n"] for n in range(4)]
    assert rows[-4] == {"n": 0} and rows[::3] == [{"n": 0}, {"n": 3}]
    for number in (4, -5):
        with pytest.raises(IndexError, match=rf"row {number} of 4"):
            rows[number]
