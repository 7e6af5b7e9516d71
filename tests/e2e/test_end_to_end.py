"""The default command and other algorithms, half as long: the accuracy of what was never seen rises by reinforcement.
`.ci/run` runs the default in full.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rft
from rft.setup.assembly import Job
from tests.conftest import ENDS_S

pytestmark = pytest.mark.slow
ACCURACY = "eval/heldout/accuracy"
RISE = 0.3


def train(resolved, folder, *overrides):
    """Runs the default with the overrides; returns its rows of metrics.jsonl."""
    result = Job(resolved(f"output_dir={folder}", *overrides)).fit("")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert result == rows[-1][ACCURACY]
    return rows


def ends(rows, stage):
    """Accuracy as a stage begins and as it ends; a stage begins where the one before it ended."""
    first = next(number for number, row in enumerate(rows) if row["stage"] == stage)
    began = rows[first] if rows[first]["step"] == 0 else rows[first - 1]
    return began[ACCURACY], rows[-1][ACCURACY]


def test_the_default_learns(resolved, tmp_path):
    rows = train(resolved, tmp_path / "run", "steps=30")
    began, ended = ends(rows, "train")
    assert rows[0][ACCURACY] < 0.3, "before the warm-up"
    assert began < 0.3, "after the warm-up, before the reinforcement"
    assert ended >= 0.9
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + RISE
    texts = [
        json.loads(line) for line in (tmp_path / "run" / "trajectories" / f"step_{rows[-1]['step']:08d}.jsonl").open()
    ]
    shown = [row for row in texts if row["set"] == "eval/heldout"]
    right = sum(row["response"] == row["prompt"].split(" ")[1].removesuffix("=")[::-1] for row in shown)
    assert right >= 0.7 * len(shown) > 0, "the texts themselves are right"
    greedy_texts_of_the_checkpoint(tmp_path / "run" / "checkpoints" / "latest" / "actor", shown)


def greedy_texts_of_the_checkpoint(folder, shown):
    """transformers alone loads the checkpoint and answers what the run's own engine answered."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for row in shown:
        prompt = torch.tensor([tokenizer(row["prompt"], add_special_tokens=False).input_ids])
        answer = model.generate(prompt, max_new_tokens=16, do_sample=False, pad_token_id=tokenizer.pad_token_id,
                                eos_token_id=tokenizer.eos_token_id)  # fmt: skip
        assert tokenizer.decode(answer[0, prompt.shape[1] :], skip_special_tokens=True) == row["response"]


@pytest.mark.parametrize("algorithm", ["ppo", "sft"])
def test_other_algorithms_learn(algorithm, resolved, tmp_path):
    steps = 60 if algorithm == "sft" else 30  # its steps are short, and it has had no warm-up
    rows = train(resolved, tmp_path / "run", f"algorithm={algorithm}", f"steps={steps}")
    began, ended = ends(rows, "train")
    assert ended >= began + RISE
    if algorithm != "sft":
        assert began < 0.3


def test_a_sweep_ends_with_a_comparison(sized, tmp_path):
    command = [sys.executable, "-m", "rft.main", "-m", *sized("algorithm=grpo,gspo", "seed=0,1", "steps=2")]
    environment = os.environ | {"PYTHONPATH": str(Path(rft.__file__).parent.parent), "COLUMNS": "160"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=ENDS_S)
    assert found.returncode == 0, found.stdout + found.stderr
    names = [f"reverse-{algorithm}-seed{seed}" for algorithm in ("grpo", "gspo") for seed in (0, 1)]
    runs = {path.parent: path for path in tmp_path.rglob("result.json")}
    assert sorted(next(name for name in names if folder.name.startswith(name)) for folder in runs) == sorted(names)
    [page] = tmp_path.rglob("comparison*.html")
    for label in ("algorithm=grpo", "algorithm=gspo"):
        assert label in page.read_text()
        assert label in found.stdout, "in the table"
    assert "comparison" in found.stdout
