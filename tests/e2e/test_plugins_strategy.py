"""A strategy of one's own trains what FSDP2 trains, to a millionth."""

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rft.setup.assembly import Job
from rft.strategy.fsdp2 import FSDP2
from tests.helpers import Interrupted, interrupt, numbers

PLUGINS = Path(__file__).parent / "plugins"
PLAIN = {"_target_": "plain_strategy.PlainStrategy", "device": "cpu"}
RUN = ("steps=2", "strategy.device=cpu", "actor.optimizer.lr=1e-2", "actor.optimizer.eps=1e-4")
RUNS = {
    "sft": ("algorithm=sft", "batch.minibatches=2"),
    "grpo": ("algorithm=grpo", "algorithm/terms=[kl]", "batch.minibatches=2", "actor.micro_batch_tokens=64"),
    "ppo": ("algorithm=ppo",),
}


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch, plugins_forgotten):
    monkeypatch.syspath_prepend(PLUGINS)


def with_plain(config):
    """The config with the strategy of the plugin."""
    return config | {"strategy": copy.deepcopy(PLAIN)}


def model_of(run):
    return load_file(run / "checkpoints" / "latest" / "actor" / "model.safetensors")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [name if name == "grpo" else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_it_trains_what_fsdp2_trains(name, tiny, tmp_path):
    config = tiny(*RUN, *RUNS[name])
    Job(copy.deepcopy(config) | {"output_dir": str(tmp_path / "fsdp2")}).fit("")
    Job(with_plain(config) | {"output_dir": str(tmp_path / "plain")}).fit("")
    expected, found = (
        [
            {
                key: value
                for key, value in row.items()
                if key.startswith(("loss/", "grad_norm", "lr", "entropy", "eval/"))
            }
            for row in numbers(tmp_path / run)
        ]
        for run in ("fsdp2", "plain")
    )
    assert any(key.startswith("loss/") for row in expected for key in row)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(model_of(tmp_path / "plain"), model_of(tmp_path / "fsdp2"), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_an_interrupted_run_ends_as_if_it_had_not_been(tiny, tmp_path, monkeypatch):
    config = with_plain(tiny(*RUN, "algorithm=sft", "checkpoint.every=1"))
    whole, parts = config | {"output_dir": str(tmp_path / "whole")}, config | {"output_dir": str(tmp_path / "parts")}
    result = Job(copy.deepcopy(whole)).fit("")
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(Interrupted):
            Job(copy.deepcopy(parts)).fit("")
    assert Job(copy.deepcopy(parts)).fit("") == result
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    torch.testing.assert_close(model_of(tmp_path / "parts"), model_of(tmp_path / "whole"), rtol=0, atol=0)


def test_its_own_checks_are_heard(tiny):
    with pytest.raises(ValueError, match=r"^actor\.lora: PlainStrategy trains whole weights; set actor\.lora=null"):
        Job(with_plain(tiny("actor/lora=lora")))
    config = tiny()
    with pytest.raises(ValueError, match=r"^strategy\.compile: PlainStrategy takes device"):
        Job(config | {"strategy": PLAIN | {"compile": False}})
    with pytest.raises(ValueError, match=r"^strategy\._target_: CheckpointOptions is no strategy; name a class"):
        Job(
            config
            | {
                "strategy": {
                    "_target_": "rft.train.checkpoint.options.CheckpointOptions",
                    "every": 1,
                    "keep_last": 1,
                    "keep_best": 1,
                    "keep_every": 0,
                    "export_every": 1,
                    "fallback": None,
                    "export_dtype": "auto",
                }
            }
        )


def test_the_strategy_is_short():
    assert len((PLUGINS / "plain_strategy.py").read_text().splitlines()) < 150


class Optionless(FSDP2):
    """A strategy whose options are not those of a strategy."""

    Options = Path


def test_a_class_whose_options_are_of_another_kind_is_refused(tiny):
    said = "Optionless names no dataclass of its options; give it `Options = ...`, derived from rft.strategy.base.Stra"
    with pytest.raises(ValueError, match=rf"^strategy\._target_: {re.escape(said)}"):
        Job(tiny() | {"strategy": {"_target_": f"{__name__}.Optionless"}})
