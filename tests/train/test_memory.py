"""A run that is out of memory names the phase, the keys with their values, and the command that plans."""

import sys

import pytest
import torch
from rich.console import Console

from rft.algorithm import ADVANTAGES, LOSSES
from rft.modes.train import memory_by_stage, train
from rft.rollout.engine.hf import HFEngine
from rft.setup.assembly import Job
from rft.train.memory import Largest, advice, is_out_of_memory, largest_term
from rft.train.stage import Phase
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
def message(tiny, monkeypatch):
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


def test_in_a_loss_the_function_is_named_too(message):
    text = message("loss")
    assert text.startswith(
        "rank 0 is out of memory in the phase update of step 1 (step 1: the loss 'huge' failed: test_"
    )
    assert "). Lower actor.micro_batch_tokens=16384, or set strategy.activation_checkpointing=full (now none). " in text


def test_in_an_advantage(message):
    text = message("advantage")
    assert text.startswith("rank 0 is out of memory in the phase columns of step 1 (")
    assert "). Lower actor.micro_batch_tokens=16384. " in text


def test_in_the_engine(message):
    text = message(owner=HFEngine, method="generate")
    assert text.startswith("rank 0 is out of memory in the phase rollout of step 1 (")
    assert "). Lower rollout.engine.max_rows=256. " in text


def test_in_the_weights_of_the_engine(message):
    text = message(owner=HFEngine, method="update_weights")
    assert text.startswith("rank 0 is out of memory in the phase publish of step 0 (")


def test_in_a_checkpoint(message):
    text = message(owner=Trainer, method="save_model")
    assert text.startswith("rank 0 is out of memory in the phase checkpoint of step 3 (")
    assert "). Take a smaller model, or more ranks. " in text


def test_keys_that_the_config_does_not_have_are_not_named():
    config = {
        "rollout": {"engine": {}, "engine_args": {"gpu_memory_utilization": 0.4}},
        "strategy": {"activation_checkpointing": "full"},
        "actor": {"micro_batch_tokens": 64},
    }
    assert advice(Phase.PUBLISH, config, None, False).startswith(
        "Lower rollout.engine_args.gpu_memory_utilization=0.4. "
    )
    assert advice(Phase.UPDATE, config, None, False).startswith("Lower actor.micro_batch_tokens=64. ")
    assert advice(Phase.ROLLOUT, {"rollout": {}, "strategy": {}}, None, False).startswith("Take a smaller model")


def test_other_errors_stay_what_they_are():
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shape")) and not is_out_of_memory(ValueError("DefaultCPUAllocator"))


PLAN = {
    "warmup": {"weights": 5, "logits": 9},
    "update": {"weights": 30, "activations": 20, "optimizer (CPU)": 70},
    "export": {"weights": 1},
    "save": {"weights": 1, "checkpoint (CPU)": 8},
}


def test_the_largest_term_is_that_of_the_memory_that_is_full():
    assert largest_term(PLAN, Phase.UPDATE, "train", (False,)) == Largest("weights", 30, 50)
    assert largest_term(PLAN, Phase.UPDATE, "train", (True,)) == Largest("optimizer (CPU)", 70, 70)
    assert largest_term(PLAN, Phase.UPDATE, "train", (False, True)) == Largest("optimizer (CPU)", 70, 120)
    assert largest_term(PLAN, Phase.COLUMNS, "warmup", (False,)) == Largest("logits", 9, 14)
    assert largest_term(PLAN, Phase.CHECKPOINT, "train", (False, True)) == Largest("checkpoint (CPU)", 8, 9)
    assert largest_term(PLAN, Phase.ROLLOUT, "train", (False,)) is None
    assert largest_term(PLAN | {"evaluate": {"kv cache": 2}}, Phase.EVALUATION, "warmup", (False,)) == Largest(
        "kv cache", 2, 2
    )
    assert largest_term({"update": {"weights": 1}}, Phase.UPDATE, "train", (True,)) is None


@pytest.mark.parametrize(
    ("term", "on_cpu", "cure"),
    [
        ("optimizer", False, "Set strategy.optimizer_offload=true (now false). "),
        ("optimizer", True, "Take a smaller model, or more ranks. "),
        ("optimizer (CPU)", False, "Take a smaller model, or more ranks. "),
        ("weights", False, "Set strategy.param_offload=all (now none). "),
        ("logits", True, "Lower actor.micro_batch_tokens=64. "),
        (
            "activations",
            True,
            "Lower actor.micro_batch_tokens=64, or set strategy.activation_checkpointing=full (now none",
        ),
        ("file", False, "Take a smaller model, or more ranks. "),
    ],
)
def test_the_key_is_that_of_the_largest_term(term, on_cpu, cure):
    strategy = {"activation_checkpointing": "none", "optimizer_offload": False, "param_offload": "none"}
    config = {"strategy": strategy, "actor": {"micro_batch_tokens": 64}}
    text = advice(Phase.UPDATE, config, Largest(term, 3 * 2**30, 2**32), on_cpu)
    known = f"By its plan, 4 GiB, the largest term of this phase is {term} with 3 GiB. "
    assert text.startswith(known + cure)


@pytest.mark.slow
def test_the_term_is_that_of_the_plan_of_the_run(tiny, monkeypatch):
    """The plan is made while the run holds its process group."""
    config = tiny("warmup=none", "eval.at_start=false", "strategy.device=cpu", "algorithm.loss.clip_high=0.3")
    monkeypatch.setattr(Trainer, "minimise", failing)
    with pytest.raises(ValueError, match="is out of memory in the phase update of step 1 ") as caught:
        train(config, Console(quiet=True))
    terms = memory_by_stage(config, 1)["update"]
    term = max(terms, key=terms.get)
    sentence = f"is {term} with {terms[term] / 2**30:.3g} GiB. "
    assert f"By its plan, {sum(terms.values()) / 2**30:.3g} GiB, the largest term of this phase {sentence}" in str(
        caught.value
    )


@pytest.mark.slow
def test_a_run_without_a_plan(tiny):
    assert memory_by_stage(tiny("warmup=none") | {"algorithm": {}}, 1) is None
