"""SwanLab in offline mode; skipped where the package is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.logger.records import TEXTS, build, numbers_of, write_run


def records(run: Path) -> list[Any]:
    """The records of all offline files of a run folder, oldest first."""
    store = pytest.importorskip("swanlab.sdk.internal.core_python.store")
    record = pytest.importorskip("swanlab.proto.swanlab.record.v1.record_pb2").Record
    found = []
    for path in sorted((run / "swanlab").glob("run-*/run-*.swanlab")):
        reader = store.DataStoreReader()
        reader.open(path)
        found += [record.FromString(data) for data in reader]
        reader.close()
    return found


def test_a_continued_run_keeps_its_id_and_has_the_numbers_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    run = tmp_path / "run"
    for first in (1, 3):
        write_run(run, build("swanlab", mode="offline", log_completions=True), first)
    found = records(run)
    starts = [record.start for record in found if record.HasField("start")]
    assert {(start.project, start.name, start.id) for start in starts} == {
        ("rft", "run", (run / "swanlab_id").read_text())
    }
    scalars = [record.scalar for record in found if record.HasField("scalar")]
    values = {(scalar.key, scalar.step): scalar.value.number for scalar in scalars}
    assert values == pytest.approx(numbers_of(run))
    tables = {path.name[:3]: json.loads(path.read_text()) for path in run.glob("swanlab/run-*/media/echarts/*.json")}
    missing = {"reward/format": None}
    assert {name: table["rowData"] for name, table in tables.items()} == {
        f"00{step}": [{"step": step, **TEXTS[0]}, {"step": step, **TEXTS[1], **missing}] for step in (2, 4)
    }


def test_a_failed_run_without_completions(tmp_path: Path) -> None:
    pytest.importorskip("swanlab")
    sink = build("swanlab", mode="offline")
    sink.open(tmp_path, {})
    sink.samples(1, TEXTS)
    sink.close(failed=True)
    assert not list(tmp_path.glob("swanlab/run-*/media/echarts/*.json"))
    [finish] = [record.finish for record in records(tmp_path) if record.HasField("finish")]
    assert "CRASHED" in str(finish)
