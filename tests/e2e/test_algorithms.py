"""Every `algorithm=<name>` trains: two steps of the real loop, on rollouts of a tiny model."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

import rft
from rft.setup.assembly import Job
from rft.train.trainer import Trainer
from tests.e2e.host_waits import micro_batches_watched

CONFIG = Path(rft.__file__).parent / "config" / "algorithm"
ALGORITHMS = sorted(path.stem for path in CONFIG.glob("[!_]*.yaml"))
CORRECTIONS = sorted(path.stem for path in CONFIG.glob("correction/*.yaml") if path.stem != "none")


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def moved(monkeypatch):
    """Filled by a run: whether the last stage changed the policy."""
    found = {}
    begin, describe = Trainer.begin, Trainer.describe

    def begins(trainer, *args):
        done = begin(trainer, *args)
        found["before"] = {name: tensor.clone() for name, tensor in trainer.policy.weights()}
        return done

    def describes(trainer, *args):
        describe(trainer, *args)
        pairs = ((found["before"][name], tensor) for name, tensor in trainer.policy.weights())
        found["moved"] = any(not torch.equal(old, new) for old, new in pairs)

    monkeypatch.setattr(Trainer, "begin", begins)
    monkeypatch.setattr(Trainer, "describe", describes)
    return found


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_steps_move_the_weights_and_no_micro_batch_reads_the_device(name, tiny, tmp_path, moved, monkeypatch):
    given = ("algorithm.critic_warmup=1",) if name == "vapo" else ()
    config = tiny(f"algorithm={name}", "steps=2", "batch.minibatches=2", "trajectories.rows=1", *given)
    config["algorithm"]["group_size"] = min(config["algorithm"]["group_size"], 4)
    with micro_batches_watched(monkeypatch) as waits:
        Job(config).fit("")
    assert waits == []
    steps = [line for line in lines(tmp_path / "run") if line["stage"] == "train" and "grad_norm" in line]
    assert len(steps) == 2 - config["algorithm"]["critic_warmup"]
    for line in steps:
        losses = {key: value for key, value in line.items() if key.startswith("loss/")}
        assert losses and all(math.isfinite(value) for value in losses.values())
        assert line["grad_norm"] > 0
    assert moved["moved"]


def test_no_micro_batch_of_padded_rows_reads_the_device(tiny, monkeypatch):
    config = tiny("algorithm=ppo", "steps=1", "actor.packing=false", "actor.share_prefix=false")
    with micro_batches_watched(monkeypatch) as waits:
        Job(config).fit("")
    assert waits == []


# With one update per batch all of these are the policy gradient.
RATIOS = ("grpo", "gspo", "gspo_token", "cispo", "gmpo", "sapo", "two_sided", "vespo", "m2po", "kl_cov")


@pytest.mark.slow
def test_losses_of_a_ratio_train_other_weights_with_the_minibatches_of_the_default(tiny, resolved, monkeypatch):
    found = {}
    describe = Trainer.describe

    def describes(trainer, *args):
        describe(trainer, *args)
        found["weights"] = torch.cat([tensor.detach().flatten().clone() for _, tensor in trainer.policy.weights()])

    monkeypatch.setattr(Trainer, "describe", describes)

    minibatches = resolved()["batch"]["minibatches"]
    moving = ("batch.epochs=3", "actor.optimizer.lr=0.05")  # far enough for the bound of two_sided
    sizes = ("steps=1", "warmup=none", f"batch.minibatches={minibatches}", *moving)
    runs = {name: f"algorithm={name}" for name in RATIOS} | {"clip_high": "algorithm.loss.clip_high=0.28"}
    weights = {}
    for name, override in runs.items():
        Job(tiny(override, *sizes)).fit("")
        weights[name] = found["weights"]
    equal = {pair for pair in itertools.combinations(weights, 2) if torch.equal(*(weights[name] for name in pair))}
    # advantages are equal within a row, where GSPO-token is GSPO (2507.18071, section 4.3) but for rounding
    assert equal - {("gspo", "gspo_token")} == set()


@pytest.mark.parametrize("anchor", ["old", "rollout"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_trains(name, anchor, tiny, tmp_path, moved):
    """With a rollout policy that differs: the engine samples at another temperature than the trainer computes."""
    if name.startswith("opsm") and anchor == "old":
        pytest.skip("its anchor is the rollout policy")
    loss = ["algorithm/loss=reinforce"] if anchor == "rollout" and not name.startswith("opsm") else []
    given = f"algorithm.correction.anchor={anchor}"
    config = tiny(f"algorithm/correction={name}", given, *loss, "steps=1", "batch.minibatches=2", "rollout.top_k=20")
    Job(config).fit("")
    last = [line for line in lines(tmp_path / "run") if line["stage"] == "train"][-1]
    assert last["rollout/kl"] > 1e-4
    assert {"correction/tokens_rejected", "correction/rows_rejected"} <= set(last)


@pytest.mark.parametrize("name", ["dpo", "robust_dpo", "ipo", "hinge", "simpo", "orpo", "cpo", "kto"])
def test_the_margin_of_given_preferences_rises(name, tiny, tmp_path):
    """Of pairs that the policy has not seen: every step has new ones."""
    sizes = ("steps=12", "data.train.task=add", "data.train.count=256", "batch.prompts=16", "actor.optimizer.lr=3e-3")
    Job(tiny(f"algorithm={name}", *sizes)).fit("")
    steps = [line for line in lines(tmp_path / "run") if line["stage"] == "train"]
    first, last = steps[0], steps[-1]
    assert last["preference/margin"] > first["preference/margin"]
    assert name == "kto" or last["preference/accuracy"] >= 0.75  # that of KTO is against a baseline
    gaps = [line["preference/logprob_chosen"] - line["preference/logprob_rejected"] for line in (first, last)]
    assert gaps[1] > gaps[0] + 0.5
