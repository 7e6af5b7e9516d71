"""Every `algorithm=<name>` and every correction trains: steps of the real trainer, on rollouts of a tiny model."""

import functools
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

import rft
from rft.metrics import Metrics
from rft.setup.assembly import Job
from tests.e2e.host_waits import micro_batches_watched
from tests.e2e.train_stage import TrainStage, stages

CONFIG = Path(rft.__file__).parent / "config" / "algorithm"
ALGORITHMS = sorted(path.stem for path in CONFIG.glob("[!_]*.yaml"))
CORRECTIONS = sorted(path.stem for path in CONFIG.glob("correction/*.yaml") if path.stem != "none")
PREFERENCES = ("dpo", "cdpo", "robust_dpo", "ipo", "hinge", "simpo", "orpo", "cpo", "kto")

# With the rollout policy as the anchor the weights of a correction hold the ratio, which a loss is then without.
LOSS_OF_ANCHOR = {"old": (), "rollout": ("algorithm/loss=reinforce",)}


def small_groups(config):
    config["algorithm"]["group_size"] = min(config["algorithm"]["group_size"], 4)
    return config


@pytest.fixture(scope="module")
def small(resolved, sized):
    """The resolved config of a tiny run without a folder."""

    def resolve(*overrides):
        return small_groups(resolved(*sized("actor.model_config.num_hidden_layers=1", *overrides)))

    return resolve


@pytest.fixture
def train_stage(small, tmp_path):
    """Makes the last stage of a tiny run."""
    with stages(small, tmp_path) as make:
        yield make


def finite_losses(numbers):
    losses = {name: number for name, number in numbers.items() if name.startswith("loss/")}
    return bool(losses) and all(math.isfinite(number) for number in losses.values())


def moved(before, after):
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_moves_the_weights_and_no_micro_batch_reads_the_device(name, train_stage, monkeypatch):
    given = ("algorithm.critic_warmup=1",) if name == "vapo" else ()
    train = train_stage(f"algorithm={name}", "batch.minibatches=2", *given)
    before, warmup = train.weights(), train.job.run.algorithm.critic_warmup
    with micro_batches_watched(monkeypatch) as waits:
        for _ in range(warmup):
            numbers = train.take(train.rows())
            assert "grad_norm" not in numbers and numbers["critic/grad_norm"] > 0
            assert not moved(before, train.weights())
        rows = train.rows()
        numbers = train.take(rows)
    assert waits == []
    assert set(train.job.facts.writes) <= set(rows.keys())
    assert finite_losses(numbers) and numbers["grad_norm"] > 0
    assert moved(before, train.weights())


def test_no_micro_batch_of_padded_rows_reads_the_device(train_stage, monkeypatch):
    train = train_stage("algorithm=ppo", "actor.packing=false", "actor.share_prefix=false")
    with micro_batches_watched(monkeypatch) as waits:
        train.take(train.rows())
    assert waits == []


@pytest.mark.parametrize("name", ["grpo", "ppo", "dapo", "prime", "sft", "dpo", "gkd", "reward_model"])
def test_two_steps_of_a_whole_run(name, tiny, tmp_path):
    """With each model beside the policy, on rows that are sampled, given, or both."""
    Job(small_groups(tiny(f"algorithm={name}", "steps=2", "batch.minibatches=2", "trajectories.rows=1"))).fit("")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "train" and "grad_norm" in line]
    assert len(steps) == 2
    for line in steps:
        assert finite_losses(line) and line["grad_norm"] > 0


# With one update per batch all of these are the policy gradient.
RATIOS = ("grpo", "gspo", "gspo_token", "cispo", "gmpo", "sapo", "two_sided", "vespo", "m2po", "kl_cov")


def test_losses_of_a_ratio_train_other_weights_with_the_minibatches_of_the_default(small, resolved, train_stage):
    minibatches = resolved()["batch"]["minibatches"]
    moving = ("batch.epochs=3", "actor.optimizer.lr=0.05")  # far enough for the bound of two_sided
    sizes = (f"batch.minibatches={minibatches}", *moving)
    runs = {name: f"algorithm={name}" for name in RATIOS} | {"clip_high": "algorithm.loss.clip_high=0.28"}
    train = train_stage(*sizes)
    rows, weights = train.rows(), {}
    for name, override in runs.items():
        train.begin(Job(small(override, *sizes)).algorithm)
        train.take(rows)
        weights[name] = train.weights()
    equal = {pair for pair in itertools.combinations(weights, 2) if not moved(*(weights[name] for name in pair))}
    # advantages are equal within a row, where GSPO-token is GSPO (2507.18071, section 4.3) but for rounding
    assert equal - {("gspo", "gspo_token")} == set()


@pytest.fixture(scope="module")
def off_policy(small, tmp_path_factory):
    """A stage, rows of it that the engine sampled from another policy, and the weights after a step without correction.

    The engine samples with top_k. Of the four answers to a prompt two are moved to the trainer's own policy, and one to
    a policy that finds all its tokens less likely. The trainer finds the last token of the fourth all but impossible.
    """
    train = TrainStage(small("batch.minibatches=2", "rollout.top_k=20"), tmp_path_factory.mktemp("off_policy"))
    rows, without = train.rows(), {}
    assert train.take(rows)["rollout/kl"] > 1e-4
    train.begin(train.stage.algorithm)
    own = rows.clone()
    train.trainer.compute_columns(train.stage, own, Metrics())
    for number, sampled in enumerate(rows["rollout_logprobs"]):
        answer = own["loss_mask"][number]
        if number % 4 < 3:
            sampled[answer] = own["old_logprobs"][number, answer] - [0.0, 0.0, 1.0][number % 4]
        else:
            sampled[answer.nonzero()[-1]] += 10
    for loss in LOSS_OF_ANCHOR.values():
        train.begin(Job(small(*loss)).algorithm)
        train.take(rows)
        without[loss] = train.weights()
    yield train, rows, without
    train.close()


@pytest.fixture(scope="module")
def correction_options(resolved):
    """The options of a correction, from its yaml alone."""
    return functools.cache(lambda name: resolved(folder=CONFIG / "correction", name=name))


@pytest.mark.parametrize("anchor", ["old", "rollout"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_correction_acts_and_trains(name, anchor, small, correction_options, off_policy):
    if name.startswith("opsm") and anchor == "old":
        pytest.skip("its anchor is the rollout policy")
    train, rows, without = off_policy
    loss = LOSS_OF_ANCHOR["old" if name.startswith("opsm") else anchor]
    config = small(*loss)
    config["algorithm"]["correction"] = correction_options(name) | {"anchor": anchor}
    train.begin(Job(config).algorithm)
    before = train.weights()
    numbers = train.take(rows)
    rules = train.stage.algorithm.options.correction.rules
    for rule_name, rule in rules.items():
        bounded = (rule.low, rule.high) != (None, None)
        assert (0 < numbers[f"correction/outside_{rule_name}"] < 1) == bounded
    masks = any(rule.action == "mask" for rule in rules.values())
    assert [0 < numbers[f"correction/{unit}_rejected"] < 1 for unit in ("tokens", "rows")] == [masks, masks]
    assert finite_losses(numbers) and numbers["grad_norm"] > 0
    assert moved(before, train.weights()) and moved(without[loss], train.weights())


@pytest.fixture(scope="module")
def given_rows(small, tmp_path_factory):
    """The stage of an algorithm of given preferences, and rows of six steps: every step has new ones."""
    made = []

    @functools.cache
    def draw(name):
        sizes = ("data.train.task=add", "data.train.count=96", "batch.prompts=16", "actor.optimizer.lr=1e-2")
        made.append(TrainStage(small(f"algorithm={name}", *sizes), tmp_path_factory.mktemp(name)))
        return made[-1], [made[-1].rows() for _ in range(6)]

    yield draw
    for train in made:
        train.close()


@pytest.mark.parametrize("name", PREFERENCES)
def test_the_margin_of_given_preferences_rises(name, small, given_rows):
    """Of pairs that the policy has not seen."""
    train, rows = given_rows("kto" if name == "kto" else "dpo")
    train.begin(Job(small(f"algorithm={name}")).algorithm)
    steps = [train.take(each) for each in rows]
    first, last = steps[0], steps[-1]
    assert last["preference/margin"] > first["preference/margin"]
    assert name == "kto" or last["preference/accuracy"] >= 0.75  # that of KTO is against a baseline
    gaps = [step["preference/logprob_chosen"] - step["preference/logprob_rejected"] for step in (first, last)]
    assert gaps[1] > gaps[0] + 0.5
