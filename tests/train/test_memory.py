"""A run that is out of memory names the phase, the keys with their values, and the command that plans."""

import sys

import pytest
import torch

from rft.algorithm import ADVANTAGES, LOSSES
from rft.rollout.engine.hf import HFEngine
from rft.setup.assembly import Job
from rft.train.memory import advice, chain, is_out_of_memory, phase_of
from rft.train.trainer import Trainer


def allocate():
    """A real failure of torch's allocator: 1 PiB."""
    return torch.empty(2**50, dtype=torch.uint8)


@LOSSES.register("huge", reads=("advantages",))
def huge(logprobs, batch):
    allocate()
    return -logprobs * batch["advantages"], {}


@ADVANTAGES.register("huge")
def huge_advantage(scores, rewards, batch):
    allocate()


def failing(*_, **__):
    allocate()


@pytest.fixture
def said(tiny, monkeypatch):
    """What a run says in which a part of the config, or a method, allocates too much."""
    monkeypatch.setattr(sys, "argv", ["rft", "steps=3", "mode=train"])

    def run(part=None, owner=None, method=None):
        config = tiny("warmup=none", "eval.at_start=false", "strategy.device=cpu")
        if part is not None:
            config["algorithm"][part] = {"name": "huge"}
        if owner is not None:
            monkeypatch.setattr(owner, method, failing)
        with pytest.raises(ValueError) as caught:
            Job(config).fit("")
        text = str(caught.value)
        assert "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1125899906842624 bytes" in text
        assert text.endswith("by term, the largest first: python -m rft.main steps=3 mode=plan")
        return text

    return run


def test_in_a_loss_the_function_is_named_too(said):
    text = said("loss")
    assert text.startswith(
        "rank 0 is out of memory in the phase update of step 1 (step 1: the loss 'huge' failed: test_"
    )
    assert "). Lower actor.micro_batch_tokens=16384, or set strategy.activation_checkpointing=full (now none). " in text


def test_in_an_advantage(said):
    text = said("advantage")
    assert text.startswith("rank 0 is out of memory in the phase annotate of step 1 (")
    assert "). Lower actor.micro_batch_tokens=16384. " in text


def test_in_the_engine(said):
    text = said(owner=HFEngine, method="generate")
    assert text.startswith("rank 0 is out of memory in the phase rollout of step 1 (")
    assert "). Lower rollout.engine.max_rows=256. " in text


def test_in_a_checkpoint(said):
    text = said(owner=Trainer, method="save_model")
    assert text.startswith("rank 0 is out of memory in the phase checkpoint of step 3 (")
    assert "). Take a smaller model, or more ranks. " in text


def test_keys_that_the_config_does_not_have_are_not_named():
    config = {
        "rollout": {"engine": {}, "engine_args": {"gpu_memory_utilization": 0.4}},
        "strategy": {"activation_checkpointing": "full"},
        "actor": {"micro_batch_tokens": 64},
    }
    assert advice("refresh", config).startswith("Lower rollout.engine_args.gpu_memory_utilization=0.4. ")
    assert advice("update", config).startswith("Lower actor.micro_batch_tokens=64. ")
    assert advice("rollout", {"rollout": {}, "strategy": {}}).startswith("Take a smaller model")


def test_other_errors_stay_what_they_are():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shape")) and not is_out_of_memory(ValueError("DefaultCPUAllocator"))
    assert phase_of(chain(KeyError("x"))) == "rollout"
