"""The recipe of a real model: its rows, and a step of each command with the model itself (suite `smollm2`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rft
from rft.registry import Target
from rft.reward.rules.instructions.ifeval import ifeval
from rft.setup.assembly import Job
from tests.conftest import SOON_S

ROOT = Path(rft.__file__).parent.parent
RECIPE = ROOT / "recipes" / "smollm2"
RUNS = ("addition", "addition_lora", "dpo", "grpo")
FILE = os.environ.get("RFT_SMOLLM2")
needs_model = pytest.mark.skipif(FILE is None, reason="RFT_SMOLLM2 names no file that prepare_smollm2.py has fetched")
SHORT = ("steps=1", "batch.prompts=2", "algorithm.group_size=2", "rollout.max_new_tokens=8", "eval.samples=0")


@pytest.fixture
def recipe(monkeypatch, plugins_forgotten):
    monkeypatch.syspath_prepend(RECIPE)


@pytest.mark.parametrize("name", RUNS)
def test_it_composes(name, recipe, resolved):
    config = resolved(folder=RECIPE, name=name)
    assert config["actor"]["path"].endswith(".gguf")
    Job(config)


def follow(kind, arguments, word):
    """An answer that follows an instruction and one that does not, written from its arguments."""
    text = f"I saw it and thought about {word}"
    return {
        "quotation": (f'"{text}"', text),
        "end_checker": (f"{text}. {arguments.get('end_phrase')}", f"{arguments.get('end_phrase')} {text}"),
        "title": (f"<<snow>>\n{text}", text),
        "number_highlighted_sections": (f"{text} {'*snow* ' * arguments.get('num_highlights', 0)}", text),
        "number_bullet_lists": (f"* {text}\n" * arguments.get("num_bullets", 0), f"* {text}"),
        "postscript": (f"{text}\nP.S. again", text),
        "number_placeholders": (f"{text} on [name]", text),
        "number_words": (text, f"{text} {'snow ' * arguments.get('num_words', 0)}"),
        "no_comma": (text, f"{text}, too"),
        "existence": (f"{text} {' '.join(arguments.get('keywords', []))}", text),
        "capital_word_frequency": (f"{text} {'SNOW ' * arguments.get('capital_frequency', 0)}", text),
    }[kind.split(":")[1]]


def test_each_kind_of_instruction_can_be_followed_and_missed(recipe):
    from verifiable_sentences import KINDS, TOPICS, Instructions

    rows = Instructions("data.train", list(KINDS), first=0, topics=8, seed=0).load([])
    assert len({*TOPICS}) == len(TOPICS) and len(rows) == 8 * len(KINDS)
    for row in rows:
        (*_, kind), (_, words, arguments) = row["instruction_id_list"], row["kwargs"]
        right, wrong = follow(kind, arguments, word := words["keywords"][0])
        texts = [right, wrong, right.replace(word, "that")]
        assert [ifeval(text, row, mode="strict", score="all") for text in texts] == [1, 0, 0], kind
    assert {row["data_source"] for row in rows} == {kind.split(":")[1] for kind in KINDS}


def test_a_phrase_to_end_with_is_no_answer(recipe):
    from verifiable_sentences import ENDINGS, Instructions

    rows = Instructions("data.train", ["startend:end_checker"], first=0, topics=48, seed=0).load([])
    assert not any(ifeval(text, row, mode="strict", score="all") for row in rows for text in ENDINGS)


def test_no_prompt_is_both_trained_on_and_held_out(recipe, resolved):
    for name in ("grpo", "addition"):
        data = resolved(folder=RECIPE, name=name)["data"]
        parts = [Target(node, "data", ("key",)).build(key="data") for node in (data["train"], data["eval"]["heldout"])]
        trained, held_out = ({row["prompt"] for row in rows.load([])} for rows in parts)
        assert not trained & held_out and len(held_out) >= 48


def test_the_answers_of_sums(recipe):
    from two_digit_sums import Additions

    rows = Additions("data.train", start=0, count=8100).load([])
    assert len({row["prompt"] for row in rows}) == 8100
    for row in rows[::100]:
        numbers = [int(word.rstrip("?")) for word in row["prompt"].split() if word.rstrip("?").isdigit()]
        assert row["answer"] == row["response"] == str(sum(numbers)) and len(numbers) == 2


def test_mistakes(recipe):
    from two_digit_sums import Additions
    from verifiable_sentences import Instructions

    with pytest.raises(ValueError, match=r"data.train.kinds: no such kind rhyme; choose from startend:quotation, "):
        Instructions("data.train", ["rhyme"], first=0, topics=1, seed=0)
    with pytest.raises(ValueError, match=r"data.train: first=1 and topics=64, but there are 64 topics"):
        Instructions("data.train", ["startend:quotation"], first=1, topics=64, seed=0)
    with pytest.raises(ValueError, match=r"data.train: start=8000 and count=101 are more than 8100 sums"):
        Additions("data.train", start=8000, count=101)


@pytest.mark.suite
@needs_model
@pytest.mark.parametrize("name", RUNS)
def test_a_step_of_the_model(name, tmp_path):
    given = [f"actor.path={FILE}", f"output_dir={tmp_path / 'run'}", *SHORT]
    if name.startswith("addition"):
        given += ["warmup.steps=1", "warmup.rows=2", "data.eval.heldout.count=2"]
    else:
        given += ["data.eval.heldout.topics=1"]
    command = [sys.executable, "-m", "rft.main", "-cd", str(RECIPE), "-cn", name, *given]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=10 * SOON_S, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["stage"] == "train" and rows[-1]["step"] == 1 + name.startswith("addition")
    if name != "dpo":  # its loss reads no log-probabilities of the policy that sampled
        assert rows[-1]["rollout/logprob_gap_max"] < 1e-3
