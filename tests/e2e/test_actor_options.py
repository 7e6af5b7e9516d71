"""Runs with options of the actor: its optimizer, frozen parts, the average of its weights, experts and adapters."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from rft.actor.reference import AdapterReference
from rft.setup.assembly import Job
from rft.train.trainer import Trainer
from tests.actor.lora.adapters import same, weights
from tests.helpers import close
from tests.train.checkpoint.states import state


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_supervised_training_learns_with_each(name, tiny, tmp_path):
    config = tiny(
        "algorithm=sft", f"actor.optimizer.name={name}", "actor.optimizer.lr=1e-2", "steps=12", "eval.every=0"
    )
    Job(config).fit("")
    rows = [line for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines() if "loss/nll" in line]
    losses = [json.loads(row)["loss/nll"] for row in rows]
    assert losses[-1] < 0.8 * losses[0]


def test_a_run_trains_the_rest(tiny, tmp_path):
    Job(
        tiny("algorithm=ppo", "actor.frozen=[model.layers.0.*]", "critic.frozen=[model.embed_tokens.*]", "steps=2")
    ).fit("")
    saved = state(tmp_path / "run")["actors"]
    trains = {key: set(saved[key]["optimizer"]["state"]) for key in ("actor", "critic")}
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


def test_a_run_goes_on_with_the_average_that_it_had(tiny, tmp_path):
    changes = ("actor.ema=0.7", "actor.frozen=[*norm*]", "checkpoint.every=1", "checkpoint.keep_last=9", "steps=4")
    whole, cut = (tiny(*changes, f"output_dir={tmp_path / name}") for name in ("whole", "cut"))
    Job(whole).fit("")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut", symlinks=True)
    folder = tmp_path / "cut" / "checkpoints"
    for step in (5, 6):
        shutil.rmtree(folder / f"step_{step:08d}")
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("step_00000004")
    (tmp_path / "cut" / "result.json").unlink()
    Job(cut).fit("")
    ends = [state(tmp_path / name) for name in ("whole", "cut")]
    averages = [end["actors"]["actor"]["average"] for end in ends]
    assert averages[0]["updates"] == averages[1]["updates"] == 4
    close(averages[1]["weights"], averages[0]["weights"], 0.0)


def test_a_run_balances(tiny, tmp_path):
    experts = ("actor.model_config.model_type=mixtral", "+actor.model_config.num_local_experts=4")
    Job(tiny(*experts, "algorithm/terms=[router_balance]")).fit("")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    balances = [row["loss/router_balance"] for row in rows if "loss/router_balance" in row]
    assert len(balances) == 3 and all(1.5 < balance < 6 for balance in balances)


def test_a_run_without_a_second_model(tiny, monkeypatch):
    """After a warm-up that trained the adapters the reference is base and adapters of that moment."""
    seen, begin = [], Trainer.begin

    def begins(trainer, number, stage, saved):
        before = weights(trainer.policy)
        done = begin(trainer, number, stage, saved)
        seen.append((before, weights(trainer.models["reference"]), trainer))
        return done

    monkeypatch.setattr(Trainer, "begin", begins)
    Job(tiny("algorithm/terms=[kl]", "actor/lora=lora", "actor.lora.rank=4")).fit("")
    trainer = seen[1][2]
    assert type(trainer.models["reference"]) is AdapterReference
    same(seen[1][1], seen[1][0], 0.0)
    same(weights(trainer.models["reference"]), seen[1][0], 0.0)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(seen[0][0][name], seen[1][0][name]), "the warm-up did something"
    assert not torch.equal(weights(trainer.policy)[name], seen[1][0][name])
