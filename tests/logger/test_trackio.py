"""Trackio on its local database; skipped where the package is not installed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.logger.records import TEXTS, build, numbers_of, write_run


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Trackio reads TRACKIO_DIR when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield pytest.importorskip("trackio.sqlite_storage").SQLiteStorage


@pytest.mark.parametrize("texts", [True, False])
def test_a_continued_run_is_one_record_with_the_numbers_of_the_folder(
    tmp_path: Path, storage: Any, texts: bool
) -> None:
    project, run = f"texts-{texts}", tmp_path / "run"
    for first in (1, 3):
        write_run(run, build("trackio", project=project, log_completions=texts), first)
    name = f"run-{(run / 'trackio_id').read_text()}"
    assert storage.get_runs(project) == [name]
    rows = storage.get_logs(project, name)
    beside = ("step", "stage", "timestamp", "completions")
    found = {(key, row["step"]): value for row in rows for key, value in row.items() if key not in beside}
    assert found == numbers_of(run)
    tables = {row["step"]: row["completions"]["_value"] for row in rows if "completions" in row}
    missing = {"reward/format": None}
    table = {step: [{"step": step, **TEXTS[0]}, {"step": step, **TEXTS[1], **missing}] for step in (2, 4)}
    assert tables == (table if texts else {})


def test_two_folders_of_one_name_are_two_runs(tmp_path: Path, storage: Any) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        write_run(tmp_path / parent / "run", build("trackio", project="names"), 1)
    assert len(storage.get_runs("names")) == 2
