"""The staleness lab: its task by hand, the age of the samples, and a run of two losses."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from bench import staleness  # noqa: E402
from bench.staleness import GROUP, LONGEST, PROMPTS, SYMBOLS, Task, method_of, outputs, policy_losses, train  # noqa: E402


@pytest.fixture
def task():
    made = Task(seed=0)
    made.lengths[:] = 3
    made.strings[:] = torch.tensor([2, 5, 0, 0, 0, 0])
    return made


def test_strings_end_and_are_drawn_with_the_seed():
    first, again, other = Task(0), Task(0), Task(1)
    assert torch.equal(first.strings, again.strings)
    assert not torch.equal(first.strings, other.strings)
    assert set(first.lengths.tolist()) <= {3, 4, 5, 6}
    for length, string in zip(first.lengths.tolist(), first.strings.tolist(), strict=True):
        assert 0 not in string[: length - 1]
        assert string[length - 1 :] == [0] * (LONGEST - length + 1)


@pytest.mark.parametrize(
    ("tokens", "score"),
    [([2, 5, 0, 0, 0, 0], 1), ([2, 5, 1, 0, 0, 0], 2 / 3), ([2, 1, 0, 0, 0, 0], 1 / 3), ([1, 5, 0, 0, 0, 0], 0)],
)
def test_the_reward_is_what_is_right_before_the_first_mistake(task, tokens, score):
    found = task.scores(torch.tensor([tokens] * PROMPTS * GROUP))
    torch.testing.assert_close(found, torch.full((PROMPTS * GROUP,), float(score)))


def test_the_expected_reward_is_exact(task):
    table = torch.randn(PROMPTS, LONGEST, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(1))
    p = table.softmax(-1)
    first, second, third = p[:, 0, 0, 2], p[:, 1, 2, 5], p[:, 2, 5, 0]
    by_hand = ((first + first * second + first * second * third) / 3).mean().item()
    assert task.expected(table) == pytest.approx(by_hand)
    sampled = [task.scores(task.sample(table)[0]).mean().item() for _ in range(200)]
    assert sum(sampled) / len(sampled) == pytest.approx(by_hand, abs=0.01)


def test_rows_are_kept_up_to_their_end(task):
    tokens, keep = task.sample(torch.zeros(PROMPTS, LONGEST, SYMBOLS, SYMBOLS))
    for row, kept in zip(tokens.tolist(), keep.tolist(), strict=True):
        length = row.index(0) + 1 if 0 in row else LONGEST
        assert kept == [True] * length + [False] * (LONGEST - length)


def test_outputs_are_those_of_the_prefix(task):
    table = torch.randn(PROMPTS, LONGEST, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(1))
    found = outputs(table, torch.tensor([3]), torch.tensor([[4, 1, 0, 0, 0, 0]]))
    p = table[3, 1, 4].softmax(-1)
    torch.testing.assert_close(found["logprobs"][0, 1], p[1].log())
    torch.testing.assert_close(found["entropy"][0, 1], -(p * p.log()).sum())
    torch.testing.assert_close(found["sum_p_squared"][0, 1], (p**2).sum())


@pytest.mark.parametrize("age", [0, 2])
def test_samples_come_from_the_policy_of_that_age(monkeypatch, age):
    sampled, trained = [], []
    sample, forward = Task.sample, staleness.outputs
    monkeypatch.setattr(Task, "sample", lambda self, table: sampled.append(table.clone()) or sample(self, table))

    def watched(table, *arguments):
        if table.requires_grad:
            trained.append(table.detach().clone())
        return forward(table, *arguments)

    monkeypatch.setattr(staleness, "outputs", watched)
    train(method_of("ppo_clip"), age, seed=0, updates=5)
    assert len(sampled) == len(trained) == 5
    for update, table in enumerate(sampled):
        assert torch.equal(table, trained[max(0, update - age)])
    assert not torch.equal(trained[0], trained[1])


START = Task(0).expected(torch.zeros(PROMPTS, LONGEST, SYMBOLS, SYMBOLS))


@pytest.mark.parametrize("name", ["ppo_clip", "clip_cov", "gmpo", "gvpo"])  # per token, with selection, row, group
def test_a_loss_moves_the_policy_up(name):
    assert train(method_of(name), 1, seed=0, updates=3) > START


@pytest.mark.slow
def test_every_loss_moves_the_policy_up():
    for name in policy_losses():
        assert train(method_of(name), 1, seed=0, updates=3) > START, name


def test_losses_that_learn_from_a_reward_are_there():
    losses = policy_losses()
    assert {"ppo_clip", "gspo", "ppo_dual_clip"} <= set(losses)
    assert "nll" not in losses


def test_a_loss_has_the_advantage_and_the_aggregation_of_its_algorithm():
    assert staleness.described(method_of("ppo_clip_higher"))["aggregation"] == "token_mean"  # dapo names it
    assert staleness.described(method_of("ppo_dual_clip")) == {  # nobody does
        "advantage": "group_norm",
        "terms": [],
        "aggregation": "seq_mean_token_mean",
    }


@pytest.mark.slow
def test_two_losses_and_few_updates(tmp_path):
    out = tmp_path / "numbers" / "staleness.json"
    options = ["--losses", "ppo_clip", "gspo", "--staleness", "0", "4", "--updates", "10", "--seeds", "2", "--out"]
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "staleness", *options, str(out)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "ppo_clip" in done.stdout
    assert "learning rate 0.1" in " ".join(done.stdout.split())
    rewards = json.loads(out.read_text())["rewards"]
    assert set(rewards) == {"ppo_clip", "gspo"}
    assert all(len(ages["4"]) == 2 and min(ages["0"]) > 0 for ages in rewards.values())
    assert rewards["gspo"]["0"] != rewards["gspo"]["4"]


@pytest.mark.parametrize("options", ["--seeds 0", "--updates 0", "--staleness 2 -1", "--losses ppo"])
def test_wrong_options_are_refused(tmp_path, options):
    parser = argparse.ArgumentParser()
    staleness.add_options(parser)
    name, *_, value = options.split()
    with pytest.raises(ValueError, match=f"{name} {value}"):
        staleness.run(parser.parse_args([*options.split(), "--out", str(tmp_path / "x.json")]))
