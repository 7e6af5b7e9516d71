"""The folders of the jobs of a sweep."""

from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from rft.modes.train import LONGEST_SUFFIX, sweep_suffix


def suffix(patch: pytest.MonkeyPatch, output_dir: str, *overrides: str, mode: RunMode = RunMode.MULTIRUN) -> str:
    given = dict(text.split("=", 1) for text in overrides)
    data, algorithm, seed = given.get("data", "reverse"), given.get("algorithm", "grpo"), given.get("seed", "0")
    name = given.get("name", f"{data}-{algorithm}-seed{seed}")
    config: dict[str, Any] = {"data": {"name": data}, "algorithm": {"name": algorithm}, "seed": seed, "name": name}
    hydra = SimpleNamespace(mode=mode, overrides=SimpleNamespace(task=list(overrides)))
    patch.setattr(HydraConfig, "initialized", lambda: True)
    patch.setattr(HydraConfig, "get", lambda: hydra)
    return sweep_suffix(config | {"output_dir": output_dir.format(name=name)})


def test_a_folder_shows_each_override_once(monkeypatch: pytest.MonkeyPatch) -> None:
    swept = ("algorithm=gspo", "seed=1", "steps=5")
    assert suffix(monkeypatch, "outputs/{name}", *swept) == "+steps=5"
    assert suffix(monkeypatch, "mine/x", *swept, "output_dir=mine/x") == "+algorithm=gspo,seed=1,steps=5"
    assert suffix(monkeypatch, "outputs/{name}", *swept, "name=n") == "+algorithm=gspo,seed=1,steps=5"
    assert suffix(monkeypatch, "mine/x", "name=a") == "+name=a"
    assert suffix(monkeypatch, "outputs/{name}", *swept, mode=RunMode.RUN) == ""


def test_a_fixed_folder_that_holds_a_name_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suffix(monkeypatch, "outputs/reverse-grpo-seed10", "seed=1") == "+seed=1"
    assert suffix(monkeypatch, "outputs/reverse-gspo_token-seed0", "algorithm=gspo") == "+algorithm=gspo"


def test_long_suffixes_stay_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (suffix(monkeypatch, "outputs/{name}", "plugins=" + "a" * 200 + end) for end in "bc")
    assert one != two and len(one) == len(two) == LONGEST_SUFFIX
