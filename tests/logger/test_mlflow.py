"""MLflow on a local store; skipped where the package is not installed."""

import json
from pathlib import Path
from typing import Any

import pytest

from rft.logger.mlflow import metric_name
from tests.logger.records import TEXTS, build, media_rows, numbers_of, write_run


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of files: mlflow-skinny has no other, and no migration of a database takes time."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "store").as_uri()


def test_a_continued_run_is_one_record_with_the_numbers_of_the_folder(tmp_path: Path, store: str) -> None:
    from mlflow import MlflowClient

    options: dict[str, Any] = {"tracking_uri": store, "tags": {"who": "me"}, "log_completions": True}
    run = tmp_path / "run"
    for first in (1, 3):
        write_run(run, build("mlflow", **options), first)
    client = MlflowClient(store)
    [experiment] = [found for found in client.search_experiments() if found.name == "rft"]
    [record] = client.search_runs([experiment.experiment_id])
    points = [p for name in record.data.metrics for p in client.get_metric_history(record.info.run_id, name)]
    found = {(point.key, point.step): point.value for point in points}
    assert found == {(metric_name(name), step): value for (name, step), value in numbers_of(run).items()}
    assert ("eval/held/pass_at_2", 3) in found
    assert (record.info.run_name, record.info.status, record.data.tags["who"]) == ("run", "FINISHED", "me")
    artifacts = Path(record.info.artifact_uri.removeprefix("file://"))
    assert json.loads((artifacts / "config.json").read_text()) == {"seed": 7}
    assert sorted(path.name for path in (artifacts / "completions").iterdir()) == [
        "step_00000002.json",
        "step_00000004.json",
    ]
    table = json.loads((artifacts / "completions" / "step_00000004.json").read_text())
    assert table["columns"] == ["step", *TEXTS[0]]
    assert table["data"] == [[4, *TEXTS[0].values()], [4, *TEXTS[1].values(), None]]


def test_without_completions_no_text_is_sent_and_a_failure_is_marked(tmp_path: Path, store: str) -> None:
    from mlflow import MlflowClient

    sink = build("mlflow", tracking_uri=store)
    sink.open(tmp_path, {})
    sink.samples(1, TEXTS)
    sink.close(failed=True)
    client, name = MlflowClient(store), (tmp_path / "mlflow_id").read_text()
    assert client.get_run(name).info.status == "FAILED"
    assert [artifact.path for artifact in client.list_artifacts(name)] == ["config.json"]


def test_a_run_that_the_store_does_not_have_is_an_error(tmp_path: Path, store: str) -> None:
    (tmp_path / "mlflow_id").write_text("0" * 32)
    with pytest.raises(ValueError, match=r"^logger\.mlflow\.tracking_uri=file:.*mlflow_id cannot be continued"):
        build("mlflow", tracking_uri=store).open(tmp_path, {})


def test_names_hold_only_what_mlflow_takes() -> None:
    assert metric_name("eval/a b/pass@4_stderr") == "eval/a b/pass_at_4_stderr"
    assert metric_name("gate:x-1.5,+") == "gate:x-1.5__"


def test_the_files_that_a_table_names_are_artifacts(tmp_path: Path, store: str) -> None:
    from mlflow import MlflowClient

    run, rows = tmp_path / "run", media_rows(tmp_path / "run")
    sink = build("mlflow", tracking_uri=store, log_completions=True)
    sink.open(run, {})
    sink.samples(1, rows)
    sink.close(failed=False)
    record = MlflowClient(store).get_run((run / "mlflow_id").read_text())
    artifacts = Path(record.info.artifact_uri.removeprefix("file://"))
    stored = {path.name: path.read_bytes() for path in (run / "media").iterdir()}
    assert {path.name: path.read_bytes() for path in (artifacts / "media").iterdir()} == stored and len(stored) == 3
    [table] = (artifacts / "completions").iterdir()
    prompts = str([row[1] for row in json.loads(table.read_text())["data"]])
    assert all(f"../media/{name}" in prompts for name in stored)
