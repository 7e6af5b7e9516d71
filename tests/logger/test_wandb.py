"""W&B in offline mode; skipped where the package is not installed."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rft
from rft.logger.wandb import Wandb
from rft.registry import Target


def build(**options: str) -> Wandb:
    node: Any = OmegaConf.to_container(OmegaConf.load(Path(rft.__file__).parent / "config" / "logger" / "wandb.yaml"))
    sink = Target(node["wandb"] | options, "logger.wandb").build()
    assert isinstance(sink, Wandb)
    return sink


def test_offline_run_is_kept_in_the_run_folder_and_continued_under_its_id(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    identities = []
    for first in (1, 3):
        sink = build(mode="offline")
        sink.check()
        sink.open(tmp_path, {"seed": 1})
        sink.rewind(first - 1)
        sink.log(first, "train", {"reward/mean": 0.5})
        sink.close(failed=False)
        identities.append((tmp_path / "wandb_id").read_text())
    assert identities[0] == identities[1]
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert files and all(identities[0] in path.name and path.stat().st_size > 0 for path in files)


def test_a_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"logger=wandb: .* pip install 'rft\[wandb\]'"):
        build().check()


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logger\.wandb\.mode: .*did you mean offline"):
        build(mode="ofline")
