"""The benchmark: its workload, and a run of the section `step` at a tiny size."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from bench.step import checked, summary  # noqa: E402
from bench.workload import Lengths, Workload, equal, skewed  # noqa: E402


def test_skewed_lengths_are_log_normal() -> None:
    lengths = torch.tensor(skewed(64, 256)).flatten().double()
    assert lengths.min() == 8
    assert lengths.max() == 256
    assert 50 < lengths.mean() < 55
    assert lengths.log().std() == pytest.approx(0.78, abs=0.05)


def test_skewed_lengths_are_the_same_every_time() -> None:
    assert skewed(16, 40) == skewed(16, 40)
    assert [len(group) for group in skewed(24, 40)] == [8, 8, 8]


@pytest.mark.parametrize("make", [skewed, equal])
@pytest.mark.parametrize("rows", [0, 4, 20])
def test_rows_that_make_no_whole_groups_are_refused(make, rows) -> None:
    with pytest.raises(ValueError, match=f"--rows {rows}.*multiple of 8"):
        make(rows, 32)


def test_lengths_are_found_by_prompt(tmp_path) -> None:
    from transformers import AutoTokenizer

    workload = Workload("tiny", skewed(16, 40))
    workload.write(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    lengths = Lengths(tmp_path, tokenizer)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    prompts = [tokenizer(row["prompt"]).input_ids for row in rows]
    assert [len(prompt) for prompt in prompts] == [24, 24]
    assert [lengths.of(prompt) for prompt in prompts] == workload.lengths
    assert tokenizer.eos_token_id not in prompts[0] + prompts[1]


def side(tokens: int, *totals: float) -> dict:
    return {"tokens": [tokens] * len(totals), "steps": [{"rollout": t / 2, "total": t} for t in totals]}


def test_medians_leave_the_first_step_out() -> None:
    numbers = summary(Workload("tiny", equal(8, 10)), 1, {"rft": side(80, 100.0, 2.0, 4.0, 3.0)})
    assert numbers["sides"]["rft"]["median_s"] == {"rollout": 1.5, "total": 3.0}
    assert numbers["sides"]["rft"]["tokens_per_s"] == pytest.approx(80 / 3)
    assert "ratio" not in numbers


def test_a_side_that_trained_other_tokens_is_refused() -> None:
    workload = Workload("tiny", equal(8, 10))
    assert checked("x", side(80, 1.0, 1.0), workload, 2)
    with pytest.raises(RuntimeError, match="79"):
        checked("x", side(79, 1.0, 1.0), workload, 2)
    with pytest.raises(RuntimeError):
        checked("x", side(80, 1.0), workload, 2)


def call(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "step", *arguments]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_step_at_a_tiny_size(tmp_path) -> None:
    out = tmp_path / "numbers" / "step.json"
    options = ["--size", "tiny", "--rows", "8", "--longest", "12", "--repeats", "1", "--out", str(out)]
    done = call(*options, "--rft-only")
    assert done.returncode == 0, done.stderr
    assert "sampled tokens per second" in done.stdout
    numbers = json.loads(out.read_text())
    ours = numbers["sides"]["rft"]
    assert ours["tokens"] == [numbers["workload"]["sampled_tokens"]] * 2
    stages = ours["median_s"]
    assert stages["rollout"] > 0
    assert stages["update"] > 0
    assert sum(seconds for stage, seconds in stages.items() if stage not in ("total", "cpu")) <= stages["total"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed (extra bench)")
def test_step_against_trl_at_a_tiny_size(tmp_path) -> None:
    out = tmp_path / "step.json"
    done = call("--size", "tiny", "--rows", "16", "--longest", "16", "--repeats", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    numbers = json.loads(out.read_text())
    assert numbers["sides"]["trl"]["tokens"] == numbers["sides"]["rft"]["tokens"]
    assert numbers["ratio"] > 0


def test_wrong_options_are_refused_before_anything_runs(tmp_path) -> None:
    done = call("--rows", "12", "--trl-rows", "4", "--out", str(tmp_path / "x.json"))
    assert done.returncode == 1
    assert "multiple of 8" in done.stderr
