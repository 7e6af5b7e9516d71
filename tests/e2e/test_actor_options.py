"""Runs with options of the actor: its optimizer, frozen parts, the average of its weights, experts and adapters."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from rft.actor.lora.reference import AdapterReference
from rft.setup.assembly import Job
from rft.train.trainer import Trainer
from tests.actor.lora.adapters import same, weights
from tests.e2e.train_stage import stages
from tests.helpers import close
from tests.train.checkpoint.states import state


@pytest.fixture
def stage(tiny, tmp_path):
    """Makes the last stage of a tiny run without a warm-up."""
    with stages(tiny, tmp_path) as make:
        yield make


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_supervised_training_learns_with_each(name, stage):
    train = stage("algorithm=sft", f"actor.optimizer.name={name}", "actor.optimizer.lr=1e-2")
    losses = [train.step()["loss/nll"] for _ in range(12)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_run_trains_the_rest(stage):
    frozen = ("actor.frozen=[model.layers.0.*]", "critic.frozen=[model.embed_tokens.*]")
    train = stage("algorithm=ppo", *frozen, "warmup=none")
    for _ in range(2):
        train.step()
    models = train.trainer.models
    trains = {key: set(models[key].state_dict()["optimizer"]["state"]) for key in ("actor", "critic")}
    assert not any(".layers.0." in name for name in trains["actor"]) and any(
        ".layers.1." in name for name in trains["actor"]
    )
    assert not any("embed_tokens" in name for name in trains["critic"]) and "head.weight" in trains["critic"]


def test_every_checkpoint_holds_the_average_as_a_model(tiny, tmp_path):
    """The warm-up has its own, which ends with it."""
    config = tiny("actor.ema=0.5", "checkpoint.every=1", "checkpoint.keep_last=9", "actor.optimizer.lr=1e-2")
    Job(config).fit("")
    folders = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert len(folders) == 5
    models = {part: [AutoModelForCausalLM.from_pretrained(folder / part).state_dict() for folder in folders]
              for part in ("actor", "actor_ema")}  # fmt: skip
    shares = ([1.0], [1 / 3, 2 / 3], [0, 0, 1.0], [0, 0, 1 / 3, 2 / 3], [0, 0, 1 / 7, 2 / 7, 4 / 7])
    for step, of_step in enumerate(shares):
        by_hand = {
            name: sum(share * models["actor"][number][name] for number, share in enumerate(of_step))
            for name in models["actor"][step]
        }
        close(models["actor_ema"][step], by_hand, 1e-5)
    assert not torch.equal(models["actor"][4]["lm_head.weight"], models["actor_ema"][4]["lm_head.weight"])


@pytest.mark.slow
def test_a_run_goes_on_with_the_average_that_it_had(tiny, tmp_path):
    changes = ("actor.ema=0.7", "actor.frozen=[*norm*]", "checkpoint.every=1", "checkpoint.keep_last=9", "steps=3",
               "warmup=none", "eval.at_start=false", "eval.every=0")  # fmt: skip
    whole, cut = (tiny(*changes, f"output_dir={tmp_path / name}") for name in ("whole", "cut"))
    Job(whole).fit("")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", symlinks=True)
    folder = tmp_path / "cut" / "checkpoints"
    for step in (2, 3):
        shutil.rmtree(folder / f"step_{step:08d}")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("step_00000001")
    (tmp_path / "cut" / "result.json").unlink()
    Job(cut).fit("")
    ends = [state(tmp_path / name) for name in ("whole", "cut")]
    averages = [end["actors"]["actor"]["average"] for end in ends]
    assert averages[0]["updates"] == averages[1]["updates"] == 3
    close(averages[1]["weights"], averages[0]["weights"], 0.0)


def test_a_run_balances(stage):
    experts = ("actor.model_config.model_type=mixtral", "+actor.model_config.num_local_experts=4")
    train = stage(*experts, "algorithm/terms=[router_balance]", "warmup=none")
    balances = [train.step()["loss/router_balance"] for _ in range(3)]
    assert all(1.5 < balance < 6 for balance in balances)


def test_a_run_without_a_second_model(tiny, monkeypatch):
    """After a warm-up that trained the adapters the reference is base and adapters of that moment."""
    seen, begin = [], Trainer.begin

    def begins(trainer, number, stage, saved):
        before = weights(trainer.policy)
        done = begin(trainer, number, stage, saved)
        seen.append((before, weights(trainer.models["reference"]), trainer))
        return done

    monkeypatch.setattr(Trainer, "begin", begins)
    Job(tiny("algorithm/terms=[kl]", "actor/lora=lora", "actor.lora.rank=4", "steps=1", "eval.at_start=false")).fit("")
    trainer = seen[1][2]
    assert type(trainer.models["reference"]) is AdapterReference
    same(seen[1][1], seen[1][0], 0.0)
    same(weights(trainer.models["reference"]), seen[1][0], 0.0)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(seen[0][0][name], seen[1][0][name]), "the warm-up did something"
    assert not torch.equal(weights(trainer.policy)[name], seen[1][0][name])
