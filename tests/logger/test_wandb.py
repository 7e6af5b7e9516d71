"""W&B in offline mode; skipped where the package is not installed."""

import base64
import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.logger.records import TEXTS, build, media_rows, numbers_of, write_run

BLOCK, FULL, LAST = 2**15, 1, 4  # of LevelDB's log


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, after W&B's header: W&B has no reader in Python."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if (left := BLOCK - position % BLOCK) < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (FULL, LAST):
            yield parts
            parts = b""


def records(run: Path) -> list[Any]:
    """What all offline files of a run folder hold, once the service of W&B, which writes them, has ended."""
    pytest.importorskip("wandb").teardown()
    record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    paths = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    return [record.FromString(data) for path in paths for data in log_records(path.read_bytes())]


def history(run: Path) -> list[dict[str, Any]]:
    """The rows of all offline files of a run folder."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.history.item}
        for one in records(run)
        if one.HasField("history")
    ]


def test_an_offline_run_is_continued_under_its_id_and_has_the_numbers_and_texts_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run, identities = tmp_path / "run", []
    for first in (1, 3):
        write_run(run, build("wandb", mode="offline", log_completions=True), first)
        identities.append((run / "wandb_id").read_text())
    assert identities[0] == identities[1]
    rows = history(run)
    numbers = numbers_of(run)
    names = {name for name, _ in numbers}
    assert {(name, row["step"]): row[name] for row in rows for name in names & set(row)} == numbers
    files = [path for path in (run / "wandb").glob("offline-run-*/run-*.wandb") if identities[0] in path.name]
    assert len(files) == 2
    tables = {row["step"]: row["completions/path"] for row in rows if "completions/path" in row}
    for step in (2, 4):
        [path] = (run / "wandb").glob(f"offline-run-*/files/{tables[step]}")
        assert json.loads(path.read_text()) == {
            "columns": ["step", *TEXTS[0]],
            "data": [[step, *TEXTS[0].values()], [step, *TEXTS[1].values(), None]],
        }


def test_the_table_has_the_pictures_and_sounds_of_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run, rows = tmp_path / "run", media_rows(tmp_path / "run")
    sink = build("wandb", mode="offline", log_completions=True)
    sink.open(run, {})
    sink.samples(1, rows)
    sink.close(failed=False)
    [path] = (run / "wandb").glob("offline-run-*/files/media/table/*.json")
    table = json.loads(path.read_text())  # with the names of the classes; the artifact of the table has the files
    [artifact] = [one.artifact for one in records(run) if one.HasField("artifact")]
    sent = {Path(entry.path).name: entry.digest for entry in artifact.manifest.contents}
    stored = {path.name: path.read_bytes() for path in (run / "media").iterdir()}
    digests = {name: base64.b64encode(hashlib.md5(data).digest()).decode() for name, data in stored.items()}
    assert sent.keys() - stored.keys() == {"completions.table.json"} and sent.items() >= digests.items()
    assert len(stored) == 3
    assert table["columns"] == ["step", *rows[0], "audio 1", "image 1", "image 2"]
    shown = [row[-3:] for row in table["data"]]
    assert shown == [[None, "Image", "Image"], ["Audio", None, None], [None, None, None]]


def test_without_completions_no_text_is_sent(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    sink = build("wandb", mode="offline")
    sink.open(tmp_path, {})
    sink.samples(1, TEXTS)
    sink.close(failed=True)
    assert not list(tmp_path.glob("wandb/offline-run-*/files/media/table/*"))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logger\.wandb\.mode: .*did you mean offline"):
        build("wandb", mode="ofline")
