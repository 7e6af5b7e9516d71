"""Rows from files and data sets, and what bad ones get."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rft import waits
from rft.data.rows.lazy import load
from rft.data.rows.sources import FileRows, HubRows
from rft.registry import Target
from tests.conftest import SOON_S

DATA = os.environ.get("RFT_GSM8K_DIR")
NAMES = {"prompt": "question"}
ROWS = [{"question": f"q{n}", "answer": f"a{n}", "n": n} for n in range(4)]


def jsonl(folder: Path, text: str | bytes) -> str:
    path = folder / "train.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def lines(path: str, columns: dict[str, str] | None = None, limit: int | None = None) -> FileRows:
    return FileRows(path, NAMES if columns is None else columns, None, limit, "data.train")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return jsonl(tmp_path, "".join(json.dumps(row) + "\n" for row in ROWS))


def test_fields_are_renamed_and_the_others_stay(path: str) -> None:
    rows = lines(path).load(["prompt", "answer"])
    assert list(rows) == [row | {"prompt": row["question"]} for row in ROWS]


def test_names_can_be_swapped(path: str) -> None:
    rows = lines(path, {"answer": "question", "question": "answer"}).load(["answer"])
    assert rows[1] == {"question": "a1", "answer": "q1", "n": 1}


@pytest.mark.parametrize(("limit", "count"), [(None, 4), (1, 1), (3, 3), (9, 4)])
def test_limit_takes_the_first_rows(path: str, limit: int | None, count: int) -> None:
    assert [row["n"] for row in lines(path, limit=limit).load(["prompt"])] == list(range(count))


def test_blank_lines_are_skipped_but_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '\n{"question": "q"}\n  \n{"x": 1}\n')
    assert list(lines(path, limit=1).load(["prompt"])) == [{"question": "q", "prompt": "q"}]
    with pytest.raises(ValueError, match=r"train\.jsonl line 4: no field 'question'"):
        lines(path).load(["prompt"])


def test_unicode_and_windows_line_ends(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '\ufeff{"question": "é漢"}\r\n{"question": "b\\nc"}'.encode())
    assert [row["prompt"] for row in lines(path).load(["prompt"])] == ["é漢", "b\nc"]


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        ("", {}, r"data\.train\.path: .*train\.jsonl holds no rows"),
        ("\n \n", {}, r"data\.train\.path: .*train\.jsonl holds no rows"),
        ('{"prompt": "p", "answer": 1}\n{"prompt": \n', {}, r"train\.jsonl line 2: not JSON"),
        ('{"prompt": "p", "answer": 1}\nprompt\n', {}, r"train\.jsonl line 2: not JSON"),
        (b'{"prompt": "p", "answer": 1}\n{"prompt": "\xff"}\n', {}, r"train\.jsonl line 2: not UTF-8 \(byte 0xff\)"),
        ("[1, 2]\n", {}, r"train\.jsonl line 1: expected one JSON object a line, got list"),
        (
            '{"prompt": "p", "answer": 1}\n{"prompt": "p", "anser": 1}\n',
            {},
            r"train\.jsonl line 2: no field 'answer' \(known: prompt, anser; did you mean anser\?\); "
            r"name it with \+data\.train\.columns\.answer=<name in the data>",
        ),
        ('{"prompt": "p", "answer": null}\n', {}, r"train\.jsonl line 1: the field 'answer' is null"),
        ('{"q": "p"}\n', {"prompt": "qq"}, r"line 1: no field 'qq'.*set data\.train\.columns\.prompt to its name"),
        ('{"q": null, "answer": 1}\n', {"prompt": "q"}, r"line 1: the field 'q' is null; set data\.train\.columns"),
        ("{}\n", {}, r"line 1: no field 'prompt' \(known: none\)"),
        ('{"prompt": "p", "rft:episode": {}}\n', {}, r"line 1: the field 'rft:episode' begins with rft:"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, text: str | bytes, columns: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lines(jsonl(tmp_path, text), columns).load(["prompt", "answer"])


def test_a_path_that_is_no_file_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.train\.path=.*nothing\.jsonl: there is no such file"):
        lines(str(tmp_path / "nothing.jsonl")).load([])
    with pytest.raises(ValueError, match=r"data\.train\.path=.*: it is a folder"):
        lines(str(tmp_path)).load([])


def test_a_limit_that_leaves_nothing_names_the_key(path: str) -> None:
    node = {"path": path, "columns": NAMES, "schema": None}
    hub = {"path": "x", "name": None, "split": "train", "columns": {}, "schema": None}
    for kind, options, limit in (("FileRows", node, 0), ("HubRows", hub, -1)):
        with pytest.raises(ValueError, match=rf"^data\.train\.limit={limit}: it must be at least 1$"):
            Target({"_target_": f"rft.data.rows.sources.{kind}", "limit": limit} | options, "data.train", ("key",))


def test_built_from_yaml(path: str) -> None:
    node: dict[str, Any] = {
        "_target_": "rft.data.rows.sources.FileRows",
        "path": path,
        "columns": NAMES,
        "schema": None,
    }
    node["limit"] = 2
    source = Target(node, "data.train", ("key",)).build(key="data.train")
    assert len(source.load(["prompt"])) == 2
    with pytest.raises(ValueError, match=r"data\.train\.colums: .*did you mean columns"):
        Target(node | {"colums": {}}, "data.train", ("key",))


@pytest.mark.skipif(DATA is None, reason="RFT_GSM8K_DIR is not set")
@pytest.mark.parametrize(("name", "count"), [("train", 7473), ("test", 1319)])
def test_gsm8k(name: str, count: int) -> None:
    columns = {"prompt": "question", "response": "answer"}
    rows = lines(f"{DATA}/{name}.jsonl", columns).load(["prompt", "response", "answer"])
    assert len(rows) == count
    assert all(row["response"] == row["answer"] and "#### " in row["answer"] for row in rows)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in a local folder: train as parquet."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    table = tmp_path / "table"
    table.mkdir()
    datasets.Dataset.from_list([*ROWS, {"question": "q4", "answer": None, "n": 4}]).to_parquet(table / "train.parquet")
    return table


def hub(folder: Path, columns: dict[str, str], limit: int | None = None, split: str | None = "train") -> HubRows:
    return HubRows(str(folder), None, split, columns, None, limit, "data.train")


def test_hub_rows(folder: Path) -> None:
    rows = hub(folder, NAMES, limit=4).load(["prompt", "answer"])
    assert list(rows) == [row | {"prompt": row["question"]} for row in ROWS]


def test_a_wait_for_a_process_that_prepares_the_same_data_set_is_said(folder, caplog, monkeypatch):
    FileLock = pytest.importorskip("filelock").FileLock
    hub(folder, {"prompt": "question"}).load(["prompt"])
    locks = [str(path) for path in folder.parent.rglob("*.lock")]
    assert locks, "the package locks its cache"
    monkeypatch.setattr(waits, "SAY_AFTER_S", 0.02)
    loads = threading.Thread(target=lambda: hub(folder, {"prompt": "question"}).load(["prompt"]))
    held = [FileLock(path) for path in locks]
    for lock in held:
        lock.acquire()
    loads.start()
    deadline = time.monotonic() + SOON_S
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    for lock in held:
        lock.release()
    loads.join(SOON_S)
    message = f"data.train: the package datasets loads {folder}, or waits for a process that does, 0 s"
    assert caplog.messages[0] == message and not loads.is_alive()


def test_hub_rows_name_the_row(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"table\[train\] row 5: the field 'answer' is null"):
        hub(folder, NAMES).load(["answer"])
    with pytest.raises(ValueError, match=r"table\[train\] row 1: no field 'response'.*data\.train\.columns\.response"):
        hub(folder, NAMES).load(["response"])


def test_hub_errors_name_the_key(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.train: cannot load path=.* split='test'.*"):
        hub(folder, NAMES, split="test").load([])
    with pytest.raises(ValueError, match=r"data\.train: cannot load path='.*nowhere'"):
        hub(folder / "nowhere", NAMES).load([])


def test_a_split_has_to_be_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.train\.split: .*table has the splits train; name one of them"):
        hub(folder, NAMES, split=None).load([])


def test_a_data_set_is_named_on_the_command_line(folder: Path, resolved: Any) -> None:
    """data=hub: one path for both sets; what holds for the training set holds for the other."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS[:4])
    for split in ("train", "test"):
        table.to_parquet(folder / "named" / f"{split}.parquet")
    data = resolved("data=hub", f"data.path={folder / 'named'}", "+data.train.columns.prompt=question")["data"]
    for key, node in (("data.train", data["train"]), ("data.eval.heldout", data["eval"]["heldout"])):
        rows = load(Target(node, key, ("key",)), ["prompt"])
        assert [row["prompt"] for row in rows] == [row["question"] for row in ROWS[:4]]
    assert data["train"]["split"] == "train" and data["eval"]["heldout"]["split"] == "test"


def test_a_hub_that_cannot_be_reached_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"data\.train: cannot load path='openai/no-such-set' name=None split='train':"
    ):
        hub(Path("openai/no-such-set"), {}).load([])


def test_a_saved_data_set(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(folder / "alone")
    datasets.DatasetDict(train=table, test=table.select([2])).save_to_disk(folder / "both")
    renamed = [row | {"prompt": row["question"]} for row in ROWS]
    assert list(hub(folder / "alone", NAMES, split=None).load(["prompt"])) == renamed
    assert list(hub(folder / "both", NAMES, split="test").load(["prompt"])) == renamed[2:3]
    with pytest.raises(ValueError, match=r"data\.train: .*: the folder holds one table; set data\.train\.split=null"):
        hub(folder / "alone", NAMES).load([])
    with pytest.raises(ValueError, match=r"data\.train: cannot load .*split='dev'"):
        hub(folder / "both", NAMES, split="dev").load([])
    with pytest.raises(ValueError, match=r"data\.train\.split: .*both has the splits train, test"):
        hub(folder / "both", NAMES, split=None).load([])


def test_a_missing_package_comes_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"data\.train needs the package datasets: pip install datasets"):
        HubRows("x", None, "train", {}, None, None, "data.train").load([])


def test_names_of_fields_in_a_message_are_on_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"promptx\n": "a", "b" * 90: 1, **{f"f{number}": 0 for number in range(30)}}
    path.write_text(json.dumps(row))
    with pytest.raises(ValueError, match="no field 'prompt'") as error:
        FileRows(str(path), {}, None, None, "data.train").load(("prompt",))
    said = str(error.value)
    assert f"(known: promptx , {'b' * 64}, f0, " in said and "f17 and 12 more; did you mean promptx" in said
    assert "\n" not in said
