"""What a run takes, gone through without numbers: every part of it follows from the config, byte by byte."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

import rft
from rft.problems import Problems
from rft.rehearsal import Rehearsal
from rft.rollout.cache import capacity

ROOT = Path(rft.__file__).parent.parent
HERE = Path(__file__).parent
SMALL = (
    "plan.prompt_tokens=20",
    "rollout.max_new_tokens=12",
    "batch.prompts=8",
    "algorithm.group_size=4",
    "warmup=none",
    "actor.model_config.hidden_size=64",
    "actor.model_config.intermediate_size=128",
    "actor.model_config.head_dim=16",
    "actor.micro_batch_tokens=256",
)
CASES = {
    "plain": (),
    "two ranks": ("plan.ranks=2",),
    "four ranks": ("plan.ranks=4",),
    "a GPU that is not here": ("strategy.device=cuda",),
    "reference": ("algorithm/terms=[kl]",),
    "critic": ("algorithm=ppo", "algorithm.group_size=4"),
    "8 bit": ("actor.optimizer.name=adamw_8bit",),
    "adapters": ("actor/lora=lora", "actor.lora.rank=2", "algorithm/terms=[kl]"),
    "average": ("actor.ema=0.9",),
    "computed again": ("strategy.activation_checkpointing=full",),
    "bfloat16": ("strategy=bf16",),
    "small forwards": ("actor.micro_batch_tokens=100",),
    "padded": ("actor.packing=false",),
    "shared prefixes": ("actor.share_prefix=true",),
    "slices": ("plan.ranks=2", "strategy.context_parallel=2"),
    "many updates": ("batch.minibatches=4", "batch.epochs=2", "algorithm.correction=null"),
    "few rows at once": ("rollout.engine.max_rows=8",),
    "longer answers": ("rollout.max_new_tokens=60",),
    "supervised": ("algorithm=sft", "batch.prompts=32"),
    "warm-up": ("warmup=supervised", "warmup.rows=8"),
    "redrawn": ("algorithm=dapo", "algorithm.group_size=4"),
    "more prompts": ("batch.prompts=64",),
}


@pytest.fixture(scope="module")
def forecasts(resolved, tmp_path_factory):
    """Runs in a process of its own: here may be a process group already."""
    folder = tmp_path_factory.mktemp("forecasts")
    configs = {name: resolved("mode=plan", *SMALL, *overrides) for name, overrides in CASES.items()}
    shape = Qwen3Config(**{k: v for k, v in configs["plain"]["actor"]["model_config"].items() if k != "model_type"})
    shape.vocab_size = 19
    shape.save_pretrained(folder / "shape")  # no weights, no tokenizer
    path = [f"actor.path={folder / 'shape'}", "actor.model_config=null", "actor.tokenizer.alphabet=01"]
    configs["a path without weights"] = resolved("mode=plan", *SMALL, *path)
    data = [override for override in SMALL if not override.startswith("plan")]
    configs["data at hand"] = resolved("mode=plan", *data, "data.eval.heldout.count=64")
    (folder / "configs.json").write_text(json.dumps(configs))
    found = subprocess.run(
        [sys.executable, HERE / "forecasts.py", folder / "configs.json", folder / "forecasts.json"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert not (folder / "outputs").exists()
    return json.loads((folder / "forecasts.json").read_text())


@pytest.fixture
def terms(forecasts):
    """The terms of one stage of a case."""
    return lambda name, stage="update": forecasts[name]["memory"][stage]


def together(terms):
    return sum(terms.values())


def test_a_rank_holds_its_share_of_what_trains(forecasts, terms):
    weights = forecasts["plain"]["parameters"] * 4
    for name, ranks in {"plain": 1, "two ranks": 2, "four ranks": 4}.items():
        assert forecasts[name]["parameters"] == forecasts["plain"]["parameters"] == forecasts[name]["trained"]
        held = terms(name)
        slack = 1.05 if ranks > 1 else 1.0  # the first rank rounds up
        for term, size in {"weights": weights, "optimizer": 2 * weights}.items():
            assert size / ranks <= held[term] <= size / ranks * slack + 1024, (name, term)
    assert terms("plain", "rollout")["engine" if "engine" in terms("plain") else "weights"] == weights
    assert terms("two ranks")["engine"] == terms("four ranks")["engine"] >= weights, "whole on every rank"
    assert "engine" not in terms("plain") or terms("plain")["engine"] == 0, "one rank shares it"


def test_the_device_of_the_run_need_not_be_here(forecasts):
    assert forecasts["a GPU that is not here"] == forecasts["plain"]


def test_a_path_is_planned_from_its_config_alone(forecasts):
    assert forecasts["a path without weights"] == forecasts["plain"]
