"""Runs with a teacher: refused without one, planned with it, and ones that learn what it says, however they ask."""

import io
import json
from math import log

import pytest
from rich.console import Console

from rft.actor.init import load_model, read_config
from rft.data.encode.tokenizer import characters
from rft.distributed import stop
from rft.errors import Problems
from rft.modes.doctor.run import run
from rft.modes.inspect import inspect
from rft.modes.plan.job import PlanJob
from rft.rollout.sampler import EngineSampler
from rft.setup.assembly import Job
from tests.e2e.train_stage import TrainStage
from tests.helpers import MODEL, yaml_options


def test_there_must_be_a_teacher(tiny):
    job = Job(tiny("algorithm=distill", "teacher.model_config=null"))
    job.load(1)
    with pytest.raises(
        Problems, match=r"^teacher\.path is null, so there is no model to learn from; set it to a folder"
    ):
        job.check.end()
    job = Job(tiny("algorithm=sft", "teacher.model_config=null"))
    job.prepare(job.join())


def test_a_plan_goes_through_it(tiny):
    stop()
    memory = PlanJob(tiny("algorithm=distill", "plan.prompt_tokens=6"), 1).forecast().memory
    assert memory["columns"]["other models"] > 0


def test_a_policy_comes_closer_to_the_teacher_on_its_own_samples(tiny, tmp_path):
    """By the likeliest tokens, with the estimate from the sampled ones to tell."""
    whole = ("algorithm/loss=jsd", "algorithm/terms=[reverse_kl]", "teacher.top_k=7", "actor.optimizer.lr=3e-3")
    train = TrainStage(tiny("algorithm=on_policy_distill", *whole, "warmup=none", "batch.prompts=8"), tmp_path)
    rows = [train.step() for _ in range(8)]
    train.close()
    for name in ("loss/jsd", "loss/reverse_kl", "kl/teacher"):
        assert rows[-1][name] < 0.8 * rows[0][name], name


def logged(folder):
    """Rows of metrics.jsonl without what depends on the clock, or says how large the process is."""
    clocks = ("time/", "throughput/", "memory/")
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in rows]


@pytest.mark.parametrize(
    ("share", "other"),
    [
        pytest.param(0.0, ("algorithm=distill",), id="as given"),
        pytest.param(
            1.0,
            ("algorithm=on_policy_distill", "algorithm/advantage=none", "warmup=none"),
            id="as sampled",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gkd_at_the_ends_of_its_share_is_one_or_the_other(share, other, tiny, tmp_path, one_thread):
    whole = ("algorithm/loss=jsd", "algorithm.group_size=1", "steps=2", "actor.optimizer.lr=1e-2")
    if share:
        whole += ("reward.terms.format.weight=1.0",)
    Job(tiny("algorithm=gkd", f"algorithm.source.sampled_share={share}", *whole)).fit("")
    Job(tiny(*other, *whole, f"output_dir={tmp_path / 'other'}")).fit("")
    rows = logged(tmp_path / "run")
    assert rows == logged(tmp_path / "other") and len(rows) == 3
    assert all(row["grad_norm"] > 0 and ("reward/mean" in row) == bool(share) for row in rows[1:])


def test_gkd_scores_what_it_samples_and_hands_weights_over_when_it_will(tiny, tmp_path, monkeypatch):
    published, publish = [], EngineSampler.publish
    monkeypatch.setattr(
        EngineSampler,
        "publish",
        lambda sampler, version, *rest: published.append(version) or publish(sampler, version, *rest),
    )
    Job(tiny("algorithm=gkd", "steps=8", "eval.every=0")).fit("")
    rows = logged(tmp_path / "run")[1:]
    sampled = [row["step"] for row in rows if "reward/mean" in row]
    for row in rows:
        names = {"reward/std", "reward/format", "entropy", "rollout/kl", "length/truncated", "staleness/mean"}
        assert names & set(row) == (names if row["step"] in sampled else set()) and row["loss/jsd"] > 0
    assert 0 < len(sampled) < 8
    assert set(published) == {0, 8, *(step - 1 for step in sampled)}, "else it sleeps, but for the evaluations"


@pytest.mark.slow
def test_models_with_other_rows_without_a_token_train_together(tiny, tmp_path):
    """A policy of 41 rows with a reference of 33 and a teacher of 37, for 27 tokens, of which it samples no other."""
    tokenizer, paths = characters(**yaml_options("actor/tokenizer/characters.yaml")), []
    for key, rows in (("actor", 41), ("reference", 33), ("teacher", 37)):
        model = load_model(None, read_config(None, MODEL | {"max_position_embeddings": 256}, rows, key), rows)
        for saved in (model, tokenizer):
            saved.save_pretrained(tmp_path / key)
        paths += [f"{key}.path={tmp_path / key}", f"{key}.model_config=null"]
    losses = ("algorithm/loss=jsd", "+algorithm/terms=[kl,entropy]", "warmup=none", "steps=2")
    Job(tiny("algorithm=on_policy_distill", *losses, *paths)).fit("")
    for row in logged(tmp_path / "run")[1:]:
        assert 0.9 * log(27) < row["entropy"] < log(27) < log(33)
        assert row["loss/jsd"] > 0 and row["kl/ref"] > 0 and row["rollout/logprob_gap_max"] < 1e-5


def test_what_gkd_asks_of_data_and_method(tiny):
    with pytest.raises(Problems, match=r"^algorithm\.source\.sampled_share=1\.5: it must be at most 1"):
        Job(tiny("algorithm=gkd", "algorithm.source.sampled_share=1.5"))
    with pytest.raises(Problems, match=r"reads the column 'scores', which nothing before it writes"):
        Job(tiny("algorithm=gkd", "algorithm/advantage=reinforce"))
    job = Job(tiny("algorithm=gkd", "actor.model_config.max_position_embeddings=17"))
    job.load(1)
    with pytest.raises(Problems) as caught:
        job.check.end()
    for problem in ("with rollout.max_new_tokens=6 that is over", "the row has 18 tokens, over the model's"):
        assert any(text.startswith("data.train: ") and problem in text for text in caught.value.messages)


@pytest.mark.slow
def test_other_modes_look_at_both_kinds_of_its_steps(tiny):
    shown = Console(file=io.StringIO(), width=100, soft_wrap=True)
    inspect(tiny("mode=inspect", "algorithm=gkd", "inspect.rows=1"), shown)
    assert "train: the given texts, trained tokens are highlighted; other answers are sampled" in shown.file.getvalue()
    assert "row 1: 18 tokens, 5 train" in shown.file.getvalue()
    assert 0 <= run(tiny("mode=doctor", "algorithm=gkd"), Console()) < 1e-5
    with pytest.raises(ValueError, match="mode=doctor: algorithm=gkd has no step with sampled texts only"):
        run(tiny("mode=doctor", "algorithm=gkd", "algorithm.source.sampled_share=0"), Console())
    stop()
    rare = ("algorithm.source.sampled_share=0.01", "algorithm.group_size=4", "plan.prompt_tokens=6")
    forecast = PlanJob(tiny("algorithm=gkd", *rare), 1).forecast()
    assert forecast.rows == 4 * 4 and "rollout" in forecast.memory, "those of a step that is sampled"
    assert forecast.memory["columns"]["other models"] > 0
