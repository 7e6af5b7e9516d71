"""Runs with the loss of held-out texts, without held-out sets, and with a length in epochs."""

import io
import json

import pytest
from rich.console import Console

from rft.distributed import stop
from rft.modes.evaluate import evaluate
from rft.modes.plan.job import PlanJob
from rft.setup.assembly import Job

LOSS = ("eval.loss=true", "rollout=none", "eval.every=1", "warmup=none", "steps=3", "data.train.count=64")
KEPT = ("checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_best=1")


def evaluations(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: {k: v for k, v in row.items() if k.startswith("eval/")} for row in rows}


def test_the_best_checkpoint_of_a_held_out_loss_is_the_one_with_the_lowest(tiny, tmp_path):
    overrides = ("algorithm=sft", *LOSS, *KEPT, "actor.optimizer.lr=0.3")  # a rate at which the loss rises
    config = tiny(*overrides)
    returned, found = Job(config).fit(""), evaluations(tmp_path / "run")
    assert all(row.keys() == {"eval/heldout/loss", "eval/heldout/perplexity"} for row in found.values())
    losses = {step: row["eval/heldout/loss"] for step, row in found.items()}
    assert sorted(losses) == [0, 1, 2, 3] and returned == losses[3]
    best = min((1, 2, 3), key=lambda step: losses[step])
    assert best != max((1, 2, 3), key=lambda step: losses[step])
    kept = {int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_*")}
    assert kept == {best, 3}
    for which in ("latest", "best"):
        console = Console(file=io.StringIO(), width=200)
        changed = tiny(*overrides, "mode=evaluate", f"evaluate.checkpoint={which}")
        assert evaluate(changed, console) == pytest.approx(losses[3 if which == "latest" else best], rel=1e-5)
    assert not (tmp_path / "run" / "answers.jsonl").exists()


@pytest.mark.slow
def test_a_precomputed_reference_knows_the_held_out_pairs(tiny, tmp_path):
    found = []
    for precompute in ("false", "true"):
        folder = tmp_path / precompute
        changes = (f"reference.precompute={precompute}", "actor.optimizer.lr=0.01", "actor.micro_batch_tokens=64")
        Job(tiny("algorithm=dpo", *LOSS, "steps=2", *changes) | {"output_dir": str(folder)}).fit("")
        found.append(evaluations(folder))
    plain, precomputed = found
    assert plain[0]["eval/heldout/loss"] == pytest.approx(0.693147, abs=1e-5) != plain[2]["eval/heldout/loss"]
    for step in range(3):
        assert plain[step].keys() == {f"eval/heldout/{name}" for name in ("loss", "accuracy", "margin")}
        assert precomputed[step] == pytest.approx(plain[step], abs=1e-5)


def test_a_held_out_loss_needs_no_answers(resolved, tmp_path):
    for name, digits in (("train", "12345678"), ("heldout", "90")):
        rows = [{"prompt": f"{digit}=", "completion": digit} for digit in digits]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = [f"data.train.path={tmp_path / 'train.jsonl'}", f"data.eval.heldout.path={tmp_path / 'heldout.jsonl'}"]
    small = ["batch.prompts=4", "steps=1", "eval.loss=true", "rollout=none", f"output_dir={tmp_path / 'run'}"]
    Job(resolved("algorithm=sft", "data=trl", "data.template=none", *sets, *small)).fit("")
    assert set(evaluations(tmp_path / "run")[1]) == {"eval/heldout/loss", "eval/heldout/perplexity"}


@pytest.mark.parametrize("without", ["data.eval=null", "~data.eval.heldout"])
def test_a_run_without_held_out_sets_returns_its_last_training_loss(without, tiny, tmp_path):
    config = tiny("algorithm=sft", "rollout=none", "steps=2", "eval.every=1")
    config["data"]["eval"] = None if without.endswith("null") else {}
    returned = Job(config).fit("")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and returned == rows[-1]["loss/nll"]
    assert not any(name.startswith("eval/") for row in rows for name in row)


def test_an_evaluation_at_the_end_alone_and_top_k_of_its_samples(tiny, tmp_path):
    sampled = ("eval.samples=2", "eval.pass_k=[1]", "eval.top_k=1", "eval.temperature=100")
    Job(tiny("algorithm=sft", "steps=2", "eval.every=0", "eval.at_start=false", *sampled)).fit("")
    found = evaluations(tmp_path / "run")
    assert list(found) == [1, 2] and not found[1]
    # the most likely token is drawn at any temperature, so samples are the greedy answers
    assert found[2]["eval/heldout/mean@2"] == found[2]["eval/heldout/accuracy"]


def test_epochs_are_steps_that_draw_every_row(tiny, tmp_path):
    config = tiny("algorithm=sft", "steps=null", "epochs=1.5", "data.train.count=12", "batch.prompts=8", "eval.every=0")
    Job(config).fit("")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 3  # 18 rows are 2.25 steps of 8


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("epochs=2",), "epochs=2: the run has the length steps=2; set steps=null, or epochs=null"),
        (("steps=null",), "steps=null: the run has no length; set steps, or epochs"),
        (("steps=null", "epochs=0"), "epochs=0: it must be above 0"),
        (("steps=null", "epochs=2", "data.streaming=64"), "epochs=2: the rows of a stream are not counted"),
        (("eval.loss=true",), "eval.loss=true: the engine samples texts that train"),
        (("algorithm=sft", "eval.loss=true", "eval.samples=4"), "eval.samples=4: with eval.loss=true nothing"),
        (("algorithm=sft", "eval.loss=true", "metric=eval/heldout/accuracy"), "metric=eval/heldout/accuracy: the run"),
        (("algorithm=sft", "rollout=none"), "rollout=none: no engine samples answers to the prompts of data.eval"),
        (("rollout=none",), "rollout=none: no engine samples the texts that train"),
        (("eval.top_p=0",), "eval.top_p=0: it must be above 0; 1 turns it off"),
        (("eval.top_k=-1",), "eval.top_k=-1: it must be at least 0; 0 turns it off"),
        (("data.eval=null", "warmup.stop_at=0.5"), "warmup.stop_at=0.5: no held-out set of data.eval is evaluated"),
    ],
)
def test_what_does_not_fit_is_refused(overrides, said, resolved):
    with pytest.raises(ValueError) as caught:
        Job(resolved("steps=2", *overrides))
    assert str(caught.value).startswith(said)


def test_a_plan_of_epochs_counts_the_rows(resolved):
    stop()
    small = ("algorithm=sft", "steps=null", "epochs=2", "data.train.count=48", "batch.prompts=4", "mode=plan")
    assert PlanJob(resolved(*small), 1).run.step_count() == 24
    with pytest.raises(ValueError, match=r"epochs=2: with plan\.prompt_tokens no rows are read"):
        PlanJob(resolved(*small, "plan.prompt_tokens=6"), 1)


def test_steps_that_only_the_rows_tell_are_checked_when_they_are_counted(tiny):
    short = ("algorithm=ppo", "algorithm.critic_warmup=4", "steps=null", "epochs=1", "data.train.count=8")
    job = Job(tiny(*short, "batch.prompts=4"))
    job.load(1)
    with pytest.raises(ValueError, match=r"algorithm\.critic_warmup=4: the policy would train in none of the steps=2"):
        job.check.end()


def test_a_held_out_text_that_is_too_long_is_refused_by_its_set(tiny):
    job = Job(tiny("algorithm=sft", *LOSS, "data.eval.heldout.length=[600,600]"))
    job.load(1)
    with pytest.raises(ValueError, match=r"data\.eval\.heldout: row \d+: the row has \d+ tokens, over the model's"):
        job.check.end()
