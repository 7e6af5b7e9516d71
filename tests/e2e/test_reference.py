"""The reference: one that moves with the policy, and one that is computed ahead."""

import copy
import json
import math
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rft.actor.actor import Actor
from rft.actor.init import load_with_head
from rft.actor.reference import PrecomputedReference, digest
from rft.distributed import stop
from rft.modes.plan.job import PlanJob
from rft.setup.assembly import Job
from rft.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
AHEAD = ("algorithm=dpo", "steps=5", "warmup=none", "batch.prompts=6", "data.train.count=9", "checkpoint.every=1")
PRECOMPUTE = "reference.precompute=true"
SHAPE = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=2, head_dim=8)  # fmt: skip


@pytest.fixture(scope="module")
def configs(resolved, sized):
    return {name: resolved(*sized(f"algorithm={name}")) for name in ("grpo", "dpo", "spin")}


def steps(folder):
    return [row for row in map(json.loads, (folder / "metrics.jsonl").open()) if "grad_norm" in row]


@pytest.fixture
def columns(monkeypatch):
    """Filled by a run: the trainer and the batch of every step, with the columns of the models."""
    found, whole = [], Trainer.compute_columns

    def computing(trainer, stage, batch, metrics):
        step = whole(trainer, stage, batch, metrics)
        found.append((trainer, batch.clone()))
        return step

    monkeypatch.setattr(Trainer, "compute_columns", computing)
    return found


def test_every_iteration_begins_where_the_last_one_ended(tiny, tmp_path):
    """Where policy and reference are one the loss is ln 2 and the margin 0, whatever the pairs, as in SPIN."""
    Job(tiny("algorithm=spin", "algorithm.iteration=2", "steps=4", "actor.optimizer.lr=1e-2", "warmup=none")).fit("")
    losses, margins = zip(
        *((row["loss/dpo"], row["preference/margin"]) for row in steps(tmp_path / "run")), strict=True
    )
    for step in range(4):
        begins = step % 2 == 0
        assert (abs(losses[step] - math.log(2)) < 1e-6) == begins
        assert (abs(margins[step]) < 1e-6) == begins


@pytest.mark.parametrize("lora", [(), pytest.param(("actor/lora=lora", "actor.lora.rank=4"), marks=pytest.mark.slow)])
def test_the_reference_samples_for_an_iteration(lora, tiny, tmp_path, columns):
    """What the engine says of its tokens is what the reference says, also after an evaluation with the policy."""
    sizes = ("algorithm.iteration=2", "steps=4", "eval.every=1", "actor.optimizer.lr=1e-2", "warmup=none")
    Job(tiny("algorithm=iterative_dpo", *lora, *sizes, "reward.terms.format.pattern='[0-4].*'")).fit("")
    versions = []
    for _, batch in columns:
        keep = batch["loss_mask"]
        torch.testing.assert_close(batch["rollout_logprobs"][keep], batch["ref_logprobs"][keep], rtol=0, atol=2e-5)
        versions.append(batch["version"][keep].unique().tolist())
    assert versions == [[0], [0], [2], [2]]
    assert [row["staleness/mean"] for row in steps(tmp_path / "run")] == [0, 1, 0, 1]
    trainer = columns[-1][0]
    assert trainer.sampler.held == ("actor", 4), "which the last evaluation measured"


def test_what_is_computed_ahead_is_what_would_be_computed_in_every_step(tiny, tmp_path, columns, monkeypatch):
    """Also of rows that come again, and by no other model than the policy."""
    loaded = []
    monkeypatch.setattr("rft.actor.model.load_with_head", lambda *given: loaded.append(given) or load_with_head(*given))
    Job(tiny(*AHEAD, "steps=3", f"output_dir={tmp_path / 'plain'}")).fit("")
    Job(tiny(*AHEAD, "steps=3", f"output_dir={tmp_path / 'ahead'}", PRECOMPUTE)).fit("")
    assert len(loaded) == 2 + 1
    plain, ahead = columns[:3], columns[3:]
    for (_, one), (_, other) in zip(plain, ahead, strict=True):
        torch.testing.assert_close(one["ref_logprobs"], other["ref_logprobs"], rtol=0, atol=1e-6)
    assert torch.equal(plain[0][1]["ref_logprobs"], ahead[0][1]["ref_logprobs"]), "the same rows in one forward"
    for one, other in zip(steps(tmp_path / "plain"), steps(tmp_path / "ahead"), strict=True):
        same = [name for name in one if name.startswith(("loss/", "preference/", "grad_norm"))]
        assert {name: other[name] for name in same} == pytest.approx({name: one[name] for name in same}, abs=2e-5)
    reference = ahead[0][0].models["reference"]
    assert isinstance(reference, PrecomputedReference) and len(reference._rows) == 2 * 9


def test_a_row_that_nothing_is_known_of_is_refused_and_so_is_a_file_that_is_gone(tiny, tmp_path, monkeypatch):
    config, file = tiny(*AHEAD, PRECOMPUTE), tmp_path / "run" / "ref_logprobs.pt"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", lambda trainer, *_: 1 / (3 - trainer.step))
        with pytest.raises(ZeroDivisionError):
            Job(config).fit("")
    kept = torch.load(file)
    other = {**{name: kept[name] for name in ("keys", "ends", "logprobs")}, "keys": kept["keys"] + 1}
    torch.save({**other, "sha256": digest(other)}, file)
    with pytest.raises(ValueError, match=r"^reference\.precompute: a row of the step is not in .*resume=never"):
        Job(config).fit("")
    flip(file)
    with pytest.raises(ValueError, match=r"^reference\.precompute: .*\.pt has changed since it was written, and"):
        Job(config).fit("")
    file.unlink()
    with pytest.raises(ValueError, match=r"^reference\.precompute: .*ref_logprobs\.pt is gone, and the policy"):
        Job(config).fit("")


def flip(file):
    """Flips a bit of the numbers in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture
def other(tmp_path):
    """The config of a run with a reference that is another model, in a folder; with more if that is asked for."""
    AutoModelForCausalLM.from_config(SHAPE).save_pretrained(tmp_path / "other")
    whole = (*AHEAD, "data.train.count=64", f"reference.path={tmp_path / 'other'}", "reference.model_config=null")
    return lambda *more: (*whole, *more)


@pytest.mark.slow
def test_another_model_is_asked_ahead_and_let_go_before_there_is_an_optimizer(other, tiny, tmp_path, monkeypatch):
    parameters, found, begin, ask = [], [], Actor.begin_training, PrecomputedReference.compute_outputs

    def asks(reference, *given):
        columns = ask(reference, *given)
        if reference._model is not None:
            parameters.extend(map(weakref.ref, reference._model.network.parameters()))
        return columns

    def begins(actor, *given):
        found.append((len(parameters), sum(parameter() is not None for parameter in parameters)))
        begin(actor, *given)

    monkeypatch.setattr(PrecomputedReference, "compute_outputs", asks)
    monkeypatch.setattr(Actor, "begin_training", begins)
    Job(tiny(*other("steps=2", f"output_dir={tmp_path / 'plain'}"))).fit("")
    Job(tiny(*other("steps=2", PRECOMPUTE))).fit("")
    (before, _), (asked, alive) = found
    assert before == 0 < asked and alive == 0
    for one, another in zip(*(steps(tmp_path / run) for run in ("plain", "run")), strict=True):
        same = [name for name in one if name.startswith(("loss/", "preference/", "grad_norm", "eval/"))]
        assert {name: one[name] for name in same} == {name: another[name] for name in same} and len(same) > 5


@pytest.mark.slow
def test_what_another_model_said_is_enough_to_go_on(other, tiny, tmp_path, monkeypatch, capsys):
    """The model may be gone by then. Where the file is gone or damaged, the model is asked again."""
    config, folder, file = tiny(*other(PRECOMPUTE)), tmp_path / "other", tmp_path / "run" / "ref_logprobs.pt"

    def stopped(step):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "update", lambda trainer, *_: 1 / (step - trainer.step))
            with pytest.raises(ZeroDivisionError):
                Job(config).fit("")

    def same(one, another):
        return all(torch.equal(one[name], another[name]) for name in ("keys", "ends", "logprobs"))

    stopped(3)
    before = torch.load(file)
    file.unlink()
    folder.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"^reference\.path: no model can be read from"):
        Job(config).fit("")
    (tmp_path / "moved").rename(folder)
    stopped(4)
    assert same(torch.load(file), before)
    flip(file)
    assert not same(torch.load(file), before)
    capsys.readouterr()
    stopped(4)
    assert same(torch.load(file), before)
    said = capsys.readouterr().out.replace("\n", " ")
    assert "has changed since it was written; its log-probabilities are computed again" in said
    folder.rename(tmp_path / "moved")
    Job(config).fit("")
    assert len(steps(tmp_path / "run")) == 5 - 3, "those that were not stopped"


@pytest.mark.slow
def test_a_plan_has_another_model_that_is_asked_ahead_before_all_else(other, tiny):
    stop()
    kept, ahead = (PlanJob(tiny(*other("plan.prompt_tokens=6", *more)), 1).forecast() for more in ((), (PRECOMPUTE,)))
    size = kept.memory["update"]["other models"]
    assert size == ahead.memory["reference"]["other models"] > 0
    assert "reference" not in kept.memory and ahead.memory["reference"]["activations"] > 0
    assert not any(terms.get("other models") for name, terms in ahead.memory.items() if name != "reference")
    assert size <= sum(kept.memory["update"].values()) - sum(ahead.memory["update"].values()) < 1.05 * size


@pytest.mark.parametrize(
    ("name", "algorithm", "reference", "message"),
    [
        ("grpo", {"iteration": -1}, {}, r"algorithm\.iteration=-1: it must be at least 0"),
        ("grpo", {"iteration": 3}, {}, r"algorithm\.iteration=3: nothing reads ref_logprobs.* algorithm\.iteration=0"),
        ("grpo", {"sampler": "reference"}, {}, r"algorithm\.sampler=reference: nothing reads ref_logprobs"),
        (
            "grpo",
            {},
            {"precompute": True},
            r"reference\.precompute=true: nothing reads ref_logprobs; set reference\.pre",
        ),
        ("grpo", {}, {"precompute": 1}, r"reference\.precompute: expected true or false, got 1"),
        (
            "dpo",
            {"sampler": "reference"},
            {},
            r"algorithm\.sampler=reference: algorithm\.source samples nothing; set al",
        ),
        ("dpo", {"iteration": 3}, {"precompute": True}, r"reference\.precompute=true: algorithm\.iteration=3 moves it"),
        (
            "dpo",
            {"iteration": 3},
            {"path": "some/model"},
            r"algorithm\.iteration=3, algorithm\.sampler=actor: .* names an",
        ),
        (
            "spin",
            {"iteration": 0},
            {"precompute": True},
            r"reference\.precompute=true: algorithm\.source samples, so no",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(name, algorithm, reference, message, configs):
    config = copy.deepcopy(configs[name])
    config["algorithm"] |= algorithm
    config["reference"] |= reference
    with pytest.raises(ValueError, match=message):
        Job(config)
