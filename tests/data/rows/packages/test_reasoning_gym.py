"""Rows that the package reasoning-gym generates."""

import importlib.util

import pytest

from rft.data.rows.packages.reasoning_gym import ReasoningGymRows, generate

pytest.importorskip("reasoning_gym")  # .ci/run installs it after the other tests: it needs a C compiler
KEY = "data.train"


def rows(tasks, count=3, seed=0, required=("prompt", "reasoning_gym")):
    return ReasoningGymRows(tasks, count, seed, KEY).load(required)


def test_rows_of_each_task(monkeypatch):
    """Those of word_ladder depend on the hash seed of the process, which the run must not matter for."""
    tasks = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, "word_ladder": {}}
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    found = rows(tasks)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert found == rows(tasks) and len(found) == 6
    assert [row["data_source"] for row in found] == ["reasoning_gym/chain_sum"] * 3 + ["reasoning_gym/word_ladder"] * 3
    for row in found:
        entry = row["reasoning_gym"]
        assert (entry["question"], entry["answer"]) == (row["prompt"], row["answer"])
        assert entry["options"] == tasks[entry["task"]] and row["data_source"].endswith(entry["task"])
    sums = [row["reasoning_gym"]["metadata"]["expression"] for row in found[:3]]
    assert [eval(text) for text in sums] == [int(row["answer"]) for row in found[:3]]


def test_another_seed_gives_other_rows():
    """The package itself gives problem n of seed 1 as problem n + 1 of seed 0."""
    options = {"max_value": 10**9}
    prompts = [[row["prompt"] for row in generate({"gcd": options}, 20, seed, KEY)] for seed in (0, 0, 1, 2**32 - 1)]
    assert prompts[0] == prompts[1] and len({prompt for some in prompts for prompt in some}) == 60


def test_a_task_without_one_right_answer_has_no_field_answer():
    [row] = generate({"graph_color": {"num_colors": 3}}, 1, 0, KEY)
    assert "answer" not in row and row["reasoning_gym"]["answer"] is None


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({}, r"^data\.train\.tasks is empty"),
        ({"gcd": {"seed": 3}}, r"^data\.train\.tasks\.gcd\.seed: remove it; data\.train\.count and data\.train\.seed"),
        ({"gcd": {"size": 3}}, r"^data\.train\.tasks\.gcd\.size: remove it"),
    ],
)
def test_options_that_are_refused_at_once(tasks, said):
    with pytest.raises(ValueError, match=said):
        ReasoningGymRows(tasks, 1, 0, KEY)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"gcdd": {}}, r"^data\.train\.tasks\.gcdd: reasoning-gym has no such task; did you mean gcd"),
        ({"gcd": {"numbers": 3}}, r"^data\.train\.tasks\.gcd: reasoning-gym refuses the options \{'numbers': 3\}"),
        ({"gcd": {"min_numbers": 0}}, r"^data\.train\.tasks\.gcd: reasoning-gym refuses the options"),
    ],
)
def test_options_that_the_package_refuses(tasks, said):
    with pytest.raises(ValueError, match=said):
        generate(tasks, 1, 0, KEY)


def test_errors_reach_the_run():
    with pytest.raises(ValueError, match=r"^data\.train\.tasks\.gcdd: reasoning-gym has no such task"):
        rows({"gcdd": {}})
    with pytest.raises(ValueError, match=r"^data\.train\.tasks\.graph_color: its rows have no field 'answer'"):
        rows({"graph_color": {}}, required=("prompt", "answer"))


def test_a_missing_package(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "reasoning_gym" else find(name))
    with pytest.raises(ValueError, match=r'^data\.train needs the package .*: pip install "rft\[reasoning_gym\]"$'):
        rows({"gcd": {}})
