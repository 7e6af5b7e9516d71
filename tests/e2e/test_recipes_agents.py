"""The recipes whose answers are episodes: short runs of their CPU settings."""

import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

import rft
from rft.setup.assembly import Job

RECIPES = Path(rft.__file__).parent.parent / "recipes"
GSM8K = os.environ.get("RFT_GSM8K_DIR")
AGENTS = {
    "external_agent": ("run",),
    "multi_turn_game": ("run",),
    "self_play": ("run",),
    "gsm8k": ("python_tool", "python_tool_cpu"),
}
SHORT = ("warmup.steps=2", "warmup.rows=8", "warmup.eval_every=0", "steps=2", "eval.every=0", "eval.at_start=false",
         "batch.prompts=2", "algorithm.group_size=2", "data.eval.heldout.count=2", "trajectories.every=1",
         "cache=null")  # fmt: skip


@pytest.fixture
def fit(resolved, monkeypatch, tmp_path, plugins_forgotten):
    """Runs a recipe in an empty folder; returns the metrics of its steps, and the saved texts of the last one."""

    def run(recipe, *overrides, name="run"):
        monkeypatch.syspath_prepend(RECIPES / recipe)
        monkeypatch.chdir(tmp_path)
        config = resolved(*overrides, f"output_dir={tmp_path / 'run'}", folder=RECIPES / recipe, name=name)
        Job(config).fit("")
        [*_, texts] = sorted((tmp_path / "run/trajectories").iterdir())
        return tuple([json.loads(line) for line in path.open()] for path in (tmp_path / "run/metrics.jsonl", texts))

    return run


@pytest.mark.slow
def test_an_agent_with_the_client_of_openai(fit):
    warm = ("warmup.steps=60", "warmup.rows=16", "warmup.optimizer.lr=1e-2", "data.train.slips=0.0",
            "data.train.count=200")  # fmt: skip
    rows, texts = fit("external_agent", *SHORT, *warm)
    assert [row["step"] for row in rows][-2:] == [61, 62]
    for row in rows[-2:]:
        assert row["episode/failed"] == 0 == row["episode/forks"] and row["episode/turns"] > 1
        assert row["rollout/logprob_gap_max"] < 1e-5, "the tokens of the gateway are those that the trainer reads"
    asked = [row["episode"]["messages"] for row in texts if row["episode"]["turns"] == 2]
    assert asked and {row["set"] for row in texts} == {"train", "eval/heldout"}
    for _, question, result, _ in asked:
        left, right = question["content"].removeprefix("?").split("*")
        assert result == {"role": "user", "content": f"{int(left) * int(right)}="}


def test_a_game_of_several_turns(fit):
    rows, texts = fit("multi_turn_game", *SHORT, "data.train.count=100", "eval.samples=0", "warmup.steps=12")
    assert [row["step"] for row in rows][-2:] == [13, 14]
    assert all(1 < row["episode/turns"] <= 5 and row["episode/failed"] == 0 for row in rows[-2:])
    played = [row["episode"] for row in texts]
    replies = [message["content"] for game in played for message in game["messages"][1:] if message["role"] == "user"]
    assert played and {*replies} == {">", "<"}


@pytest.mark.slow
def test_a_game_against_itself(fit):
    small = [word for word in SHORT if not word.startswith(("eval.at_start", "data.eval", "algorithm.group_size"))]
    rows, texts = fit("self_play", *small, "algorithm.group_size=4", "data.train.count=64", "warmup.steps=20",
                      "warmup.rows=32")  # fmt: skip
    assert rows[-1]["grad_norm"] > 0 and rows[-1]["episode/failed"] < 0.5
    played = [row["episode"] for row in texts if row["set"] == "train"]
    assert {episode["agent"] for episode in played} == {0, 1}
    games = [pair for pair in pairwise(played) if [episode["agent"] for episode in pair] == [0, 1]]
    assert len(games) == len(played) / 2
    assert all({episode["reward"] for episode in pair} == {0.0, 1.0} for pair in games), "one of two players wins"
    assert {row["episode"]["agent"] for row in texts if row["set"] != "train"} == {2}, "held-out games: the opponent"


def test_demonstrations_of_the_game_are_played_with_its_environment(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES / "multi_turn_game")
    from guessing_games import Games, Guessing

    options = {"low": 1, "high": 31, "reply": (">", "<")}
    for halves, low, high in ((1.0, 1.0, 1.0), (0.0, 0.1, 0.2)):
        rows = Games("data.train", 9700, 300, options, 5, halves, 0).load(())
        assert [row["prompt"] for row in rows[::299]] == ["9700:", "9999:"]
        won = 0
        for row in rows:
            game, said = Guessing(**options), row["demonstration"]
            game.reset(row["prompt"])
            found = [game.step(message["content"]) for message in said[::2]]
            assert [reply for reply, *_ in found[:-1]] == [message["content"] for message in said[1::2]]
            assert len(found) == 5 or found[-1][1] == 1.0
            assert not any(reward for _, reward, *_ in found[:-1])
            won += found[-1][1]
        assert low <= won / 300 <= high, "a guess of 31 numbers is right with 1/31: 1 - (30/31)^5 is 0.15"
    with pytest.raises(ValueError, match="the last game has more than four digits"):
        Games("data.train", 9700, 301, options, 5, 1.0, 0)


def test_a_tool_for_gsm8k_composes(resolved):
    config = resolved(folder=RECIPES / "gsm8k", name="python_tool")
    job = Job(config)
    assert job.environments is not None and [*job.environments.classes["python"].tools] == ["code_interpreter"]
    assert config["actor"]["path"] == "Qwen/Qwen2.5-1.5B-Instruct" == config["reference"]["path"]


@pytest.mark.slow
@pytest.mark.skipif(GSM8K is None, reason="RFT_GSM8K_DIR is not set")
def test_a_tool_for_gsm8k_on_real_problems(fit, tmp_path, monkeypatch):
    for name, count in (("train", 48), ("test", 2)):
        lines = sorted(Path(GSM8K, f"{name}.jsonl").read_text().splitlines(), key=len)[:count]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("RFT_GSM8K_DIR", str(tmp_path))
    small = ["actor.tokenizer.vocab_size=400", "rollout.max_new_tokens=16", "environment.max_tokens=32"]
    small += [f"actor.model_config.{part}=32" for part in ("hidden_size", "intermediate_size", "head_dim")]
    warm = ["warmup.steps=25", "warmup.rows=16", "warmup.optimizer.lr=2e-2", "warmup.optimizer.warmup_updates=0"]
    short = [word for word in SHORT if "heldout" not in word]
    rows, texts = fit("gsm8k", *short, *small, *warm, name="python_tool_cpu")
    assert [row["step"] for row in rows][-2:] == [26, 27] and rows[-1]["episode/failed"] == 0
    assert {row["set"] for row in texts} == {"train", "eval/test"}
    called = [row["episode"]["messages"] for row in texts if row["episode"]["tool_calls"]]
    assert called
    for _, call, output, *_ in called:
        assert call["tool_calls"][0]["function"]["name"] == "code_interpreter" and output["role"] == "tool"


def test_demonstrations_of_the_tool_are_programs(monkeypatch, plugins_forgotten):
    monkeypatch.syspath_prepend(RECIPES / "gsm8k")
    from tool_solutions import tool_solutions

    text = "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72.\n#### 72"
    found = tool_solutions({"question": "Q", "answer": text})
    assert found == {"prompt": "Q", "answer": text, "demonstration": [
        {"role": "assistant", "content": "?print(48/2)\nprint(48+24)"},
        {"role": "tool", "content": "24\n72"},
        {"role": "assistant", "content": "#### 72"},
    ]}  # fmt: skip
    plain = tool_solutions({"question": "Q", "answer": "One.\n#### 1"})
    assert plain["demonstration"] == [{"role": "assistant", "content": "One.\n#### 1"}]
