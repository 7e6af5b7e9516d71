"""Runs with a teacher: refused without one, planned with it, and ones that learn what it says, however they ask."""

import json

import pytest

from rft.build import Job
from rft.distributed import stop
from rft.plan.rehearsal import Rehearsal
from rft.problems import Problems


def test_there_must_be_a_teacher(tiny):
    job = Job(tiny("algorithm=distill", "teacher.model_config=null"))
    job.load(1)
    with pytest.raises(Problems, match=r"^teacher\.path is null, so there is nobody to learn from; set it to a folder"):
        job.check.end()
    Job(tiny("algorithm=sft", "teacher.model_config=null")).begin()


def test_a_plan_goes_through_it(tiny):
    stop()
    memory = Rehearsal(tiny("algorithm=distill", "plan.prompt_tokens=6"), 1).forecast().memory
    assert memory["annotate"]["other models"] > 0


def test_a_policy_comes_closer_to_the_teacher_on_its_own_samples(tiny, tmp_path):
    """By the likeliest tokens, with the estimate from the sampled ones to tell."""
    whole = ("algorithm/loss=jsd", "algorithm/terms=[reverse_kl]", "teacher.top_k=7", "actor.optimizer.lr=3e-3")
    Job(tiny("algorithm=on_policy_distill", *whole, "steps=8", "warmup=none", "batch.prompts=8")).fit("")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    for name in ("loss/jsd", "loss/reverse_kl", "kl/teacher"):
        assert rows[-1][name] < 0.8 * rows[0][name], name
