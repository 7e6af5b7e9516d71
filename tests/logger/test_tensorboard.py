"""TensorBoard: events read back, and a rewind that voids what came after."""

import json
from pathlib import Path

import pytest

from tests.logger.records import TEXTS, build, write_run


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def tensors(run: Path) -> dict[str, list[tuple[int, str]]]:
    """The texts of a run folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {
        tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def test_numbers_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = build("tensorboard")
    sink.check()
    sink.open(tmp_path, {"seed": 1})
    sink.log(1, "train", {"reward/mean": 0.25, "lr": 0.5})
    sink.log(2, "train", {"reward/mean": 0.75})
    sink.close(failed=False)
    assert read(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.25), (2, 0.75)], "lr": [(1, 0.5)]}


def test_rewind_voids_later_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = build("tensorboard")
    sink.open(tmp_path, {})
    for step in range(1, 5):
        sink.log(step, "train", {"reward/mean": float(step)})
    sink.close(failed=True)
    sink = build("tensorboard")
    sink.open(tmp_path, {})
    sink.rewind(2)
    sink.log(3, "train", {"reward/mean": 30.0})
    sink.close(failed=False)
    assert read(tmp_path / "tensorboard")["reward/mean"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_texts_are_logged_as_json(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for texts in (True, False):
        write_run(tmp_path / str(texts), build("tensorboard", log_completions=texts), 1)
    assert "completions/text_summary" not in tensors(tmp_path / "False")
    [(step, text)] = tensors(tmp_path / "True")["completions/text_summary"]
    assert (step, json.loads(text)) == (2, TEXTS)
