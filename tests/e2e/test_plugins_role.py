"""Roles of one's own write columns of their own: a plugin and yaml nodes, nothing else."""

import copy
from pathlib import Path

import pytest
import torch

from rft.setup.assembly import Job
from rft.train.trainer import Trainer
from tests.e2e.train_stage import TrainStage
from tests.helpers import Interrupted, identical, interrupt, numbers, weights
from tests.train.checkpoint.states import state

PLUGINS = Path(__file__).parent / "plugins"
COUNTER = {"_target_": "own_role.TokenCounter", "scale": 0.5}


@pytest.fixture
def with_roles(tiny, monkeypatch, plugins_forgotten):
    """The config of a tiny run with the roles of the plugin."""
    monkeypatch.syspath_prepend(PLUGINS)

    def resolve(*overrides):
        config = tiny("algorithm=grpo", "warmup=none", "actor.optimizer.lr=1e-2", *overrides)
        config["plugins"] = ["own_role"]
        config["counter"] = copy.deepcopy(COUNTER)
        config["imitator"] = {key: copy.deepcopy(config["prm"][key]) for key in config["prm"]}
        config["algorithm"]["advantage"] = {"name": "novelty", "surprise": 0.1}
        config["algorithm"]["imitator_loss"] = {"name": "imitation"}
        return config

    return resolve


def test_their_columns_are_computed_and_read(with_roles, tmp_path, monkeypatch):
    batches, update = [], Trainer.update

    def watched(trainer, stage, stage_step, batch, *rest):
        models = trainer.models
        batches.append((batch, weights(models["imitator"]), dict(models["counter"].counts)))
        return update(trainer, stage, stage_step, batch, *rest)

    monkeypatch.setattr(Trainer, "update", watched)
    train = TrainStage(with_roles(), tmp_path)
    for _ in range(2):
        train.step()
    train.close()
    (first, before, counts), (second, after, _) = batches
    keep = first["loss_mask"]
    torch.testing.assert_close(first["novelty"], 0.5 * keep, msg="nothing was counted before the first step")
    assert (first["imitator_logprobs"][keep] < 0).all() and not first["imitator_logprobs"][~keep].any()
    expected = (first["scores"][:, None] + first["novelty"] - 0.1 * first["imitator_logprobs"]) * keep
    torch.testing.assert_close(first["advantages"], expected)
    tokens = second["tokens", "input_ids"]
    counted = torch.tensor([[counts.get(token, 0) for token in row] for row in tokens.tolist()])
    torch.testing.assert_close(second["novelty"], 0.5 * second["loss_mask"] / (1.0 + counted))
    assert any(not torch.equal(after[name], before[name]) for name in before), "the imitator trains"


def test_they_are_logged_and_saved(with_roles, tmp_path, monkeypatch, one_thread):
    config = with_roles("checkpoint.every=1", "steps=2", "eval.at_start=false")
    whole, parts = config | {"output_dir": str(tmp_path / "whole")}, config | {"output_dir": str(tmp_path / "parts")}
    Job(copy.deepcopy(whole)).fit("")
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(Interrupted):
            Job(copy.deepcopy(parts)).fit("")
    Job(copy.deepcopy(parts)).fit("")
    found, expected = numbers(tmp_path / "parts"), numbers(tmp_path / "whole")
    assert found == expected and {"loss/imitation", "imitator/grad_norm"} <= set(expected[-1])
    one, other = (state(tmp_path / run)["actors"] for run in ("parts", "whole"))
    assert identical(one["imitator"], other["imitator"]) and one["counter"] == other["counter"] != {}


def test_what_is_missing_is_named(with_roles):
    config = with_roles()
    del config["counter"]
    with pytest.raises(ValueError, match=r"^counter is missing: the algorithm reads novelty; add `counter: \{_target_"):
        Job(config)
    config = with_roles()
    del config["algorithm"]["imitator_loss"]
    with pytest.raises(ValueError, match=r"algorithm\.imitator_loss is null, so nothing would train the imitator"):
        Job(config)
    with pytest.raises(
        ValueError, match=r"^imitator\._target_: TokenCounter is a remote model, which only teacher or count"
    ):
        Job(with_roles() | {"imitator": COUNTER})
    with pytest.raises(ValueError, match=r"^counter\.scales: TokenCounter takes scale; did you mean scale\?"):
        Job(with_roles() | {"counter": COUNTER | {"scales": 1.0}})
