"""The folders of the jobs of a sweep."""

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf
from rich.console import Console

import rft.modes.train as module
from rft.logger.log import STARTED
from rft.modes.train import LONGEST_SUFFIX, sweep_suffix, train
from rft.train.trainer import Trainer


def suffix(patch: pytest.MonkeyPatch, output_dir: str, *overrides: str, mode: RunMode = RunMode.MULTIRUN) -> str:
    given = dict(text.split("=", 1) for text in overrides)
    data, algorithm, seed = given.get("data", "reverse"), given.get("algorithm", "grpo"), given.get("seed", "0")
    name = given.get("name", f"{data}-{algorithm}-seed{seed}")
    config: dict[str, Any] = {"data": {"name": data}, "algorithm": {"name": algorithm}, "seed": seed, "name": name}
    hydra = SimpleNamespace(mode=mode, overrides=SimpleNamespace(task=OmegaConf.create(list(overrides))))
    patch.setattr(HydraConfig, "initialized", lambda: True)
    patch.setattr(HydraConfig, "get", lambda: hydra)
    return sweep_suffix(config | {"output_dir": output_dir.format(name=name)})


@pytest.mark.slow
def test_a_sweep_that_is_started_again_does_not_repeat_what_has_finished(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "in_sweep", lambda: True)
    monkeypatch.setattr(module, "sweep_suffix", lambda config: "+steps=1")

    def run(*overrides: str) -> tuple[float, str, str]:
        """What the job returns, the folder that it has used, and what it prints."""
        console = Console(file=StringIO(), width=300)
        value = train(tiny("warmup=none", "steps=1", *overrides), console)
        return value, STARTED[-1].name, console.file.getvalue()

    first = run()
    assert first[1:] == ("run+steps=1", "")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", None)  # nothing trains
        value, folder, output = run("checkpoint.keep_last=7")
        assert (value, folder) == first[:2]
        assert output == f"{tmp_path / 'run+steps=1'} holds this run, finished; resume=never repeats it\n"
    assert run("resume=never")[1] == "run+steps=1-2"
    assert run("actor.optimizer.lr=1e-3")[1] == "run+steps=1-3"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", None)
        assert run("actor.optimizer.lr=1e-3")[1] == "run+steps=1-3"
    (tmp_path / "run+steps=1" / "result.json").unlink()
    value, folder, output = run()
    assert folder == "run+steps=1-2" and "finished" in output, "an equal one has finished elsewhere"
    monkeypatch.setattr(module, "in_sweep", lambda: False)
    assert run()[1] == "run+steps=1", "a single run is continued"
    assert run()[1] == "run+steps=1-4", "and repeated"


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
