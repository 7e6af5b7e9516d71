"""TensorBoard: events read back, and a rewind that voids what came after."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rft
from rft.logger.tensorboard import TensorBoard
from rft.registry import Target


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def build() -> TensorBoard:
    node: Any = OmegaConf.to_container(
        OmegaConf.load(Path(rft.__file__).parent / "config" / "logger" / "tensorboard.yaml")
    )
    sink = Target(node["tensorboard"], "logger.tensorboard").build()
    assert isinstance(sink, TensorBoard)
    return sink


def test_numbers_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = build()
    sink.check()
    sink.open(tmp_path, {"seed": 1})
    sink.log(1, "train", {"reward/mean": 0.25, "lr": 0.5})
    sink.log(2, "train", {"reward/mean": 0.75})
    sink.close(failed=False)
    assert read(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.25), (2, 0.75)], "lr": [(1, 0.5)]}


def test_rewind_voids_later_events(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = build()
    sink.open(tmp_path, {})
    for step in range(1, 5):
        sink.log(step, "train", {"reward/mean": float(step)})
    sink.close(failed=True)
    sink = build()
    sink.open(tmp_path, {})
    sink.rewind(2)
    sink.log(3, "train", {"reward/mean": 30.0})
    sink.close(failed=False)
    assert read(tmp_path / "tensorboard")["reward/mean"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"logger=tensorboard: .* pip install 'rft\[tensorboard\]'"):
        TensorBoard(flush_s=1).check()
