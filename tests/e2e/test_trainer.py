"""The loop: what begins as what, what a step computes and what it logs."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from rft.algorithm import ADVANTAGES
from rft.algorithm.step import StepContext, select_rows
from rft.batch.columns import fields
from rft.setup.assembly import Job
from rft.setup.unread import notices
from rft.train import trainer as trainer_module
from rft.train.trainer import Trainer
from tests.e2e.train_stage import stages
from tests.helpers import ADAPTIVE, CLOCK, identical, numbers, worst
from tests.train.checkpoint.states import state

pytestmark = pytest.mark.usefixtures("one_thread")


# What begins as a copy of what


def watch(monkeypatch, part):
    """Calls `part` as ever and keeps, for every call, the trainer and what was handed in."""
    calls, whole = [], getattr(Trainer, part)

    def watching(trainer, *arguments):
        result = whole(trainer, *arguments)
        calls.append((trainer, arguments))
        return result

    monkeypatch.setattr(Trainer, part, watching)
    return calls


def watch_step(monkeypatch, name):
    """The same for a function that the trainer calls, with what was handed in alone."""
    calls, whole = [], vars(trainer_module)[name]
    monkeypatch.setattr(trainer_module, name, lambda *given: calls.append(given) or whole(*given))
    return calls


def weights(actor):
    return {name: tensor.clone() for name, tensor in actor.weights()}


@pytest.fixture
def stage(tiny, tmp_path):
    """Makes the last stage of a tiny run without a warm-up."""
    with stages(partial(tiny, "warmup=none"), tmp_path) as make:
        yield make


def test_the_reference_is_the_policy_as_the_reinforcement_begins(tiny, monkeypatch):
    seen = []
    begin = Trainer.begin

    def begins(trainer, number, stage, saved):
        before = weights(trainer.policy)
        done = begin(trainer, number, stage, saved)
        seen.append((stage.name, before, weights(trainer.models["reference"]), trainer))
        return done

    monkeypatch.setattr(Trainer, "begin", begins)
    Job(tiny("algorithm/terms=[kl]")).fit("")
    assert [name for name, *_ in seen] == ["warmup", "train"]
    assert not identical(seen[0][1], seen[1][1]), "the warm-up did something"
    assert identical(seen[1][1], seen[1][2])
    trainer = seen[1][3]
    assert identical(weights(trainer.models["reference"]), seen[1][2]), "and stays what it is"
    assert not identical(weights(trainer.policy), seen[1][2])


def test_a_reference_of_another_path_stays_what_it_was(stage, tmp_path):
    """Another model is the reference of a new policy: they differ from the start."""
    path = tmp_path / "other"
    stage("seed=2").trainer.save_model(path)
    train = stage("algorithm/terms=[kl]", f"reference.path={path}", "reference.model_config=null")
    assert train.take(train.rows())["kl/ref"] > 1e-5


def test_the_first_kl_to_the_reference_is_zero_and_the_next_is_not(stage):
    train = stage("algorithm/terms=[kl]", "actor.optimizer.lr=1e-2")
    kl = [train.take(train.rows())["kl/ref"] for _ in range(3)]
    assert kl[0] == pytest.approx(0.0, abs=1e-9)
    assert min(kl[1:]) > 1e-5


def test_the_critic_begins_with_the_backbone_of_the_policy(stage):
    models = stage("algorithm=ppo").trainer.models
    policy, critic = weights(models["actor"]), weights(models["critic"])
    assert len(critic) > 5
    for name, tensor in critic.items():
        assert torch.equal(policy[f"model.{name}"], tensor), name


def test_no_actor_is_loaded_that_nothing_reads(stage):
    assert set(stage().trainer.models) == {"actor"}


# Old log-probabilities and controllers


def timeless(numbers):
    return {name: number for name, number in numbers.items() if not name.startswith(CLOCK)}


def test_a_single_update_needs_no_old_logprobs(stage, monkeypatch):
    """The proximal policy is the current one then; computing it before gives the same steps."""
    train = stage("actor.optimizer.lr=1e-2")
    rows = [train.rows() for _ in range(3)]
    plain = [train.take(of_step) for of_step in rows]
    compute_columns, without = Trainer.compute_columns, []

    def computing(trainer, stage, batch, metrics):
        step = compute_columns(trainer, stage, batch, metrics)
        without.append("old_logprobs" not in batch.keys())
        batch["old_logprobs"] = trainer.policy.compute(batch, ("logprobs",), stage.source.temperature)["logprobs"]
        return step

    monkeypatch.setattr(Trainer, "compute_columns", computing)
    train.begin(train.stage.algorithm)
    for expected, of_step in zip(plain, rows, strict=True):
        assert timeless(train.take(of_step)) == pytest.approx(timeless(expected), abs=2e-6)
    assert without == [True] * 3 and plain[0]["grad_norm"] > 0


def test_old_logprobs_of_the_engine_are_copied(stage, monkeypatch):
    calls = watch(monkeypatch, "compute_columns")
    train = stage("algorithm.old_logprobs=rollout")
    train.take(train.rows())
    [(_, (_, batch, _))] = calls
    assert torch.equal(batch["old_logprobs"], batch["rollout_logprobs"])


def test_options_without_effect_are_named_at_the_start(tiny, capsys):
    Job(tiny("steps=1", "warmup=none")).fit("")
    said = (
        "one update per batch: the old policy is the one that trains, so ratios are 1 and algorithm.loss.clip_low, "
        "algorithm.loss.clip_high have no effect; set batch.minibatches or batch.epochs above 1"
    )
    assert said in capsys.readouterr().out
    job = Job(tiny("steps=1", "warmup=none", "batch.epochs=2"))
    assert said not in notices(job.run, job.algorithm, job.exact())


def test_several_updates_move_away_from_the_old_policy(stage):
    """Each of the 2 x 2 updates is a step of the optimizer; the ratio is one only in the first."""
    train = stage("batch.minibatches=2", "batch.epochs=2", "actor.optimizer.lr=1e-2")
    assert train.take(train.rows())["kl/old"] != 0
    optimizer = train.trainer.policy.state_dict()["optimizer"]
    assert {int(entry["step"]) for entry in optimizer["state"].values()} == {4}


def test_a_first_mini_batch_needs_no_pass_of_its_own(stage, monkeypatch):
    """What is prepared from the current policy comes from the old columns until the policy has moved."""
    calls = watch_step(monkeypatch, "current_columns")
    asked = []
    compute = StepContext.compute

    def computing(step, key, rows, outputs):
        asked.append((len(calls), outputs))
        return compute(step, key, rows, outputs)

    monkeypatch.setattr(StepContext, "compute", computing)
    given = ("algorithm=kl_cov", "algorithm/gradient_mask=high_entropy")
    train = stage(*given, "batch.minibatches=2", "batch.epochs=2", "actor.optimizer.lr=1e-2")
    train.take(train.rows())
    assert [moved for _, _, moved, _ in calls] == [False, True, True, True]
    both = {"logprobs", "entropy"}
    assert [(number, set(outputs)) for number, outputs in asked] == [(0, both), (2, both), (3, both), (4, both)]
    _, rows, _, step = calls[0]
    again = step.compute("actor", rows, ("logprobs",))
    assert not torch.allclose(again["logprobs"], rows["old_logprobs"]), "by now it has moved"


def test_the_critic_trains_alone_at_first(stage):
    train = stage("algorithm=ppo", "algorithm.critic_warmup=2")
    policy, critic = (train.trainer.models[key] for key in ("actor", "critic"))
    rows, after = [], []
    for _ in range(3):
        rows.append(train.take(train.rows()))
        after.append((weights(policy), weights(critic)))
    assert identical(after[0][0], after[1][0]) and not identical(after[0][1], after[1][1])
    assert not identical(after[1][0], after[2][0])
    assert ["loss/ppo_clip" in row for row in rows] == [False, False, True]
    assert all("loss/value" in row for row in rows)


def test_resampled_rows_train_and_every_row_is_described_whatever_the_ranks(stage, monkeypatch, ranks):
    calls = watch_step(monkeypatch, "select_rows")
    train = stage("algorithm=pf_ppo")
    told = train.take(train.rows())
    algorithm, batch, step = calls[-1]
    rows = select_rows(algorithm, batch, step)
    assert len(rows) == len(batch) == 16
    if batch["scores"].any():
        assert (rows["scores"] > 0).all()
    assert told["reward/mean"] == pytest.approx(float(batch["scores"].mean()))

    def work(world):
        return select_rows(algorithm, batch[world.rank :: 2], replace(step, world=world))["unit"].tolist()

    assert sorted(unit for part in ranks(2, work) for unit in part) == sorted(rows["unit"].tolist())


def test_rows_that_are_not_picked_do_not_train_and_are_described(stage, monkeypatch):
    calls = watch_step(monkeypatch, "select_rows")
    train = stage("algorithm=online_dpo", "algorithm.group_size=4")
    told = train.take(train.rows())
    algorithm, batch, step = calls[-1]
    differing = sum(len(batch[batch["group"] == group]["scores"].unique()) > 1 for group in batch["group"].unique())
    assert len(batch) == 16 and len(select_rows(algorithm, batch, step)) == 2 * differing
    assert told["reward/mean"] == pytest.approx(float(batch["scores"].mean()))


def test_the_process_reward_model_learns_beside_the_policy(stage):
    train = stage("algorithm=prime", "actor.optimizer.lr=1e-2")
    first, _ = (train.take(train.rows()) for _ in range(2))
    models = train.trainer.models
    assert set(models) == {"actor", "reference", "prm"}
    assert not identical(weights(models["prm"]), weights(models["reference"]))
    assert not identical(weights(models["prm"]), weights(models["actor"]))
    assert first["loss/implicit_reward"] == pytest.approx(math.log(2)), "it begins as the reference"
    assert {"prm/accuracy", "prm/grad_norm", "prm/lr"} <= set(first)


def test_adaptive_kl_moves(tiny, tmp_path):
    """Off by more than 20 %: the coefficient moves by 20 % x rows / horizon a step, from the step that sees it."""
    Job(tiny(*ADAPTIVE, "actor.optimizer.lr=1e-2", "warmup=none", "algorithm.reward_kl.coef.target=1e-7",
             "algorithm.terms.kl.coef.target=1e3", "algorithm.reward_kl.estimator=k3")).fit("")  # fmt: skip
    algorithm = state(tmp_path / "run")["algorithm"]
    for found, sign in ((algorithm["reward_kl"]["coef"], 1), (algorithm["terms"]["kl"]["coef"], -1)):
        moved = 1 + sign * 0.2 * 16 / 50
        # the KL of the first step is zero, as the reference is the policy then: under any target
        assert found == pytest.approx(0.001 * (1 - 0.2 * 16 / 50) * moved**2)


# Numbers


@ADVANTAGES.register("plain_scores")
def plain_scores(scores, rewards, batch):
    return {"advantages": batch["loss_mask"] * scores[:, None].float()}


def test_the_numbers_of_a_step_are_those_of_its_batch(tiny, tmp_path, monkeypatch):
    calls = watch(monkeypatch, "describe")
    config = tiny("steps=2", "actor.micro_batch_tokens=64", "reward.terms.exact_match.weight=0.5")
    Job(config).fit("")
    rows = [row for row in numbers(tmp_path / "run") if row["stage"] == "train"]
    batches = [arguments[0] for _, arguments in calls][-2:]
    for row, batch in zip(rows, batches, strict=True):
        texts = fields(batch)
        form = [float(text["text"][:1].isdigit() and "\n" not in text["text"]) for text in texts]
        right = [float(text["text"].strip() == text["answer"]) for text in texts]
        scores = [a + 0.5 * b for a, b in zip(form, right, strict=True)]
        mean = sum(scores) / 16
        assert row["reward/mean"] == pytest.approx(mean)
        assert row["reward/std"] == pytest.approx(math.sqrt(sum((s - mean) ** 2 for s in scores) / 15))
        assert row["reward/format"] == pytest.approx(sum(form) / 16)
        assert row["reward/exact_match"] == pytest.approx(sum(right) / 16)
        tokens = [int(mask.sum()) for mask in batch["response_mask"]]
        assert row["length/mean"] == pytest.approx(sum(tokens) / 16)
        assert row["length/max"] == max(tokens)
        cut = [text["finish_reason"] == "length" for text in texts]
        assert row["length/truncated"] == pytest.approx(sum(cut) / 16)
        assert row["staleness/mean"] == 0.0
        assert row["rollout/logprob_gap"] < 1e-5
        [tokens] = [line["tokens"] for line in worst(tmp_path / "run") if line["step"] == row["step"]]
        gaps = [abs(token["trainer"] - token["engine"]) for token in tokens]
        assert gaps == sorted(gaps, reverse=True) and len(gaps) == 5
        assert gaps[0] == pytest.approx(row["rollout/logprob_gap_max"], rel=1e-6)
        for token in tokens:
            at = batch["unit"].tolist().index(token["unit"])
            answer = batch["tokens", "input_ids"][at][batch["response_mask"][at]]
            assert answer[token["position"]] == token["token"] and token["group"] == batch["group"][at]
            assert token["engine"] == batch["rollout_logprobs"][at][batch["response_mask"][at]][token["position"]]
        assert 0 < row["entropy"] < math.log(30)
        assert row["padding/waste"] == 0.0


def test_truncated_rows_do_not_train_where_that_is_asked(stage, monkeypatch):
    calls = watch(monkeypatch, "describe")
    train = stage("algorithm.mask_truncated=true", "rollout.max_new_tokens=3")
    told = train.take(train.rows())
    [(_, (batch, _, _))] = calls
    assert batch["truncated"].any() and not batch["truncated"].all()
    assert not batch["loss_mask"][batch["truncated"]].any()
    kept = batch["loss_mask"].sum() / len(batch)
    assert told["length/trained"] == pytest.approx(float(kept))


def test_steps_evaluations_checkpoints_and_texts(tiny, tmp_path):
    config = tiny("steps=5", "warmup.steps=3", "warmup.eval_every=2", "eval.every=2", "checkpoint.every=4",
                  "checkpoint.keep_last=9", "trajectories.every=4", "trajectories.rows=3")  # fmt: skip
    result = Job(config).fit("")
    rows = numbers(tmp_path / "run")
    assert [(row["step"], row["stage"]) for row in rows] == [
        (0, "warmup"), *[(n, "warmup") for n in (1, 2, 3)], *[(n, "train") for n in (4, 5, 6, 7, 8)]
    ]  # fmt: skip
    evaluated = [row["step"] for row in rows if "eval/heldout/accuracy" in row]
    assert evaluated == [0, 2, 3, 5, 7, 8], "before, and at the end of every stage, and every second step of it"
    assert result == rows[-1]["eval/heldout/accuracy"]
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved == [f"step_{n:08d}" for n in (3, 4, 8)]
    texts = {path.name: [json.loads(line) for line in path.open()]
             for path in (tmp_path / "run" / "trajectories").iterdir()}  # fmt: skip
    sets = {name: [row["set"] for row in rows] for name, rows in texts.items()}
    train, held_out = ["train"] * 3, ["eval/heldout"] * 3
    assert {int(name[5:13]): kinds for name, kinds in sets.items()} == {
        0: held_out, 2: held_out, 3: held_out, 4: train, 5: held_out, 7: held_out, 8: train + held_out
    }  # fmt: skip
    for row in (row for rows in texts.values() for row in rows):
        assert row["prompt"].startswith("reverse ") and row["prompt"] not in row["response"]
        assert set(row) == {"set", "prompt", "response", "score", "reward/exact_match", "reward/format"}


def test_a_stage_ends_when_it_has_reached_what_it_was_for(tiny, tmp_path):
    Job(tiny("warmup.steps=9", "warmup.eval_every=2", "warmup.stop_at=0.0", "steps=1")).fit("")
    assert [row["stage"] for row in numbers(tmp_path / "run")] == ["warmup"] * 3 + ["train"]


def test_the_metric_that_is_returned_is_the_one_that_is_named(tiny, tmp_path):
    result = Job(tiny("steps=1", "metric=eval/heldout/length")).fit("")
    assert result == numbers(tmp_path / "run")[-1]["eval/heldout/length"] > 0
    last = json.loads((tmp_path / "run" / "result.json").read_text())
    assert last["eval/heldout/length"] == result
    assert last["loss/nll"] == numbers(tmp_path / "run")[2]["loss/nll"], "the last value of every number, of any stage"


def test_two_runs_of_a_seed_are_the_same_and_another_seed_is_not(stage):
    """Also with a run of another kind between them: jobs of one process do not disturb each other."""
    runs = {"one": ("seed=3",), "between": ("seed=3", "algorithm=ppo"), "same": ("seed=3",), "other": ("seed=4",)}
    found = {}
    for name, overrides in runs.items():
        train = stage(*overrides)
        found[name] = [timeless(train.take(train.rows())) for _ in range(2)], train.weights()
    assert identical(found["one"], found["same"])
    assert found["one"][0] != found["other"][0] and not identical(found["one"][1], found["other"][1])


# Model FLOPs


def test_the_utilisation_is_the_speed_of_all_models_that_train_by_the_peak(monkeypatch, stage):
    recorded, updates = watch_step(monkeypatch, "add_tflops"), watch(monkeypatch, "minimise")
    train = stage("algorithm=ppo", "batch.minibatches=2", "strategy.peak_tflops=0.5")
    row = train.take(train.rows())
    [(_, flops, seconds, _)] = recorded
    assert flops == [model.flops(prepared.rows) for _, (model, _, prepared, *_) in updates]
    assert len(flops) == 4 and min(flops) > 0
    assert row["throughput/tflops"] == pytest.approx(sum(flops) / 1e12 / seconds)
    assert row["throughput/mfu"] == pytest.approx(row["throughput/tflops"] / 0.5)


@pytest.mark.parametrize("partly", ["actor/lora=lora", "actor.frozen=['model.embed_tokens.*']"])
def test_a_model_of_which_a_part_trains_has_no_utilisation(partly, stage, tiny):
    train = stage(partly)
    row = train.take(train.rows())
    assert row["grad_norm"] > 0 and not {"throughput/tflops", "throughput/mfu"} & set(row)
    with pytest.raises(ValueError, match=r"^strategy\.peak_tflops=1\.0: throughput/mfu counts models all of whose"):
        Job(tiny(partly, "strategy.peak_tflops=1"))
