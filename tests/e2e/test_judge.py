"""A judge from pairs to reward: trained on questions, and asked by a run that samples."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rft.setup.assembly import Job

JUDGE = "algorithm=generative_reward_model"


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_judge_learns_from_pairs_and_rewards_another_run(resolved, tiny, tmp_path):
    small = ("steps=24", "actor.optimizer.lr=1e-3", "eval.every=0", "data.eval.heldout.rows.count=32")
    Job(resolved(JUDGE, *small, f"output_dir={tmp_path / 'judge'}")).fit("")
    first, last = lines(tmp_path / "judge")[0], lines(tmp_path / "judge")[-1]
    assert first["eval/heldout/accuracy"] < 0.3 and last["eval/heldout/accuracy"] > 0.9

    folder = tmp_path / "judge/checkpoints/latest/actor"
    options = (f"reward.terms.judge.path={folder}", "data/question@reward.terms.judge.question=short_good")
    terms = ("reward/terms=[exact_match,format,judge]", "reward.accuracy=judge")
    Job(tiny("data.train.task=add", *terms, *options, "steps=2")).fit("")
    asked = lines(tmp_path / "run")[-1]
    parts = [asked[f"reward/{name}"] for name in ("exact_match", "format", "judge")]
    assert asked["reward/mean"] == pytest.approx(sum(parts), abs=1e-5) and 0.0 < parts[-1] < 1.0

    told = [json.loads(line) for line in (tmp_path / "run/trajectories/step_00000004.jsonl").read_text().splitlines()]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    yes, no = tokenizer.convert_tokens_to_ids(["1", "0"])
    held_out = [row for row in told if row["set"] == "eval/heldout"]
    for row in held_out:
        ids = tokenizer(f"{row['prompt']}{row['response']} true=", return_tensors="pt").input_ids
        with torch.no_grad():
            chances = model(input_ids=ids).logits[0, -1].softmax(0)
        assert row["score"] == pytest.approx(float(chances[yes] / (chances[yes] + chances[no])), abs=1e-5)
    assert asked["eval/heldout/accuracy"] == pytest.approx(sum(row["score"] for row in held_out) / len(held_out))
