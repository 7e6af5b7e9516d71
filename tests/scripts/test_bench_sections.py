"""Most sections of the benchmark at tiny sizes."""

import argparse
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

from bench import balance, checkpoint, model_io, packing, prefix, reward, reward_models, startup, update_side  # noqa: E402
from bench.workload import GROUP, Workload, skewed  # noqa: E402

from tests.reward.sandbox.test_sandbox_attacks import start  # noqa: E402


@pytest.fixture
def update(tmp_path, monkeypatch, plugins_forgotten):
    """One side on a workload, in this process: what it wrote, and its gradient."""
    monkeypatch.delitem(sys.modules, "bench.rft_side", raising=False)

    def run(workload, kind, *options):
        if not (tmp_path / "model").exists():
            workload.write(tmp_path)
        update_side.main(tmp_path, "side", 0, kind, list(options))
        return json.loads((tmp_path / "side.json").read_text()), torch.load(tmp_path / "side.pt")

    return run


def off(gradient, other):
    largest = max(entry.abs().max() for entry in other.values())
    return float(max((gradient[name] - other[name]).abs().max() for name in other) / largest)


def test_packed_sorted_and_plain_updates_are_one_gradient_with_less_padding_each(update):
    workload = Workload("tiny", skewed(16, 40))
    cap = "actor.micro_batch_tokens=200"
    plain, reference = update(workload, "plain", "4")
    ordered, in_order = update(workload, "rft", cap, "actor.packing=false")
    packed, dense = update(workload, "rft", cap, "actor.packing=true")
    real = 16 * workload.prompt + workload.sampled
    assert plain["tokens"] == ordered["tokens"] == packed["tokens"] == real
    assert plain["computed"] == 16 * (workload.prompt + 40)
    assert plain["forwards"] == 4
    assert packed["computed"] == real < ordered["computed"] < plain["computed"]
    for side in (packed, ordered):
        assert side["metrics"]["padding/waste"] == pytest.approx(1 - real / side["computed"])
        assert side["forwards"] >= real / 200
    assert reference.keys() == in_order.keys() == dense.keys()
    assert off(in_order, reference) < 1e-5
    assert off(dense, reference) < 1e-5
    other = reference | {"model.norm.weight": 1.01 * reference["model.norm.weight"]}
    assert off(other, reference) > 1e-5


def test_a_prompt_that_is_shared_is_computed_once_a_group(update):
    workload = Workload("tiny", [[10] * 4] * 2, prompt=12)
    cap = "actor.micro_batch_tokens=88"
    shared, once = update(workload, "rft", cap, "actor.packing=true", "actor.share_prefix=true")
    packed, often = update(workload, "rft", cap, "actor.packing=true", "actor.share_prefix=false")
    assert packed["computed"] == packed["tokens"] == shared["tokens"] == 2 * 4 * (12 + 10)
    assert shared["computed"] == 2 * (12 + 4 * 10)
    assert off(once, often) < 1e-5


@pytest.mark.parametrize("name", balance.ASSIGNMENTS)
def test_every_way_assigns_every_row_once(name):
    bins = balance.ASSIGNMENTS[name](balance.costs_of(skewed(64, 200)), 4)
    assert sorted(row for rows in bins for row in rows) == list(range(64))
    assert len(bins) == 4


def test_who_deals_better():
    found = balance.imbalances(skewed(128, 500), 4)
    assert found["rft"] <= found["greedy"] < found["equal counts (verl)"] < found["as sampled"]
    counts = [len(rows) for rows in balance.equal_counts(balance.costs_of(skewed(64, 200)), 4)]
    assert counts == [16] * 4


def test_imbalance_by_hand(monkeypatch):
    monkeypatch.setattr(balance, "COST", balance.Cost(linear=1.0, quadratic=0.0, head=0.0))
    lengths = [[1] * GROUP, [3] * GROUP]
    assert balance.imbalances(lengths, 2)["as sampled"] == pytest.approx(24 / 16)
    assert balance.imbalances(lengths, 2)["equal counts (verl)"] == pytest.approx(1.0)
    assert balance.greedy([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]


@pytest.mark.parametrize(
    ("section", "options", "said"),
    [
        (packing, "--repeats 0", "--repeats 0: give at least 1"),
        (packing, "--forward-rows 0", "--forward-rows 0: give at least 1"),
        (packing, "--rows 12", "--rows 12: give a multiple of 8"),
        (prefix, "--response 0", "--response 0: give at least 1"),
        (prefix, "--groups 8 1", "--groups 1: a group of one shares nothing"),
        (balance, "--rank-rows 24", "--rank-rows 24: give a multiple of 16"),
        (balance, "--repeats 0", "--repeats 0: give at least 1"),
        (startup, "--repeats 0", "--repeats 0: give at least 1"),
        (reward, "--calls 0", "--calls 0: give at least 1"),
        (checkpoint, "--repeats 0", "--repeats 0: give at least 1"),
        (reward_models, "--layers 0", "--layers 0: give at least 1"),
    ],
)
def test_wrong_options_are_refused(section, options, said, tmp_path):
    parser = argparse.ArgumentParser()
    section.add_options(parser)
    with pytest.raises(ValueError, match=said):
        section.run(parser.parse_args([*options.split(), "--out", str(tmp_path / "x.json")]))


def call(section: str, out: Path, *options: str) -> dict:
    """What a section wrote; it printed tables."""
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), section, *options, "--repeats", "1", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "┃" in done.stdout
    return json.loads(out.read_text())


@pytest.mark.slow
def test_prefix_says_how_much_is_gained(tmp_path):
    options = ("--size", "tiny", "--groups", "2", "--prompts", "1", "--prompt", "6", "--response", "5", "--plain")
    numbers = call("prefix", tmp_path / "prefix.json", *options)
    sides = numbers["groups"]["2"]["sides"]
    assert [side["computed"] for side in sides.values()] == [16, 22, 22]
    assert all(side["gradient_difference"] < 1e-5 for side in sides.values())


@pytest.mark.slow
def test_balance_on_two_ranks(tmp_path):
    options = ("--size", "tiny", "--rows", "32", "--longest-row", "24", "--ranks", "2", "--plan", "64", "4")
    numbers = call("balance", tmp_path / "balance.json", *options)
    off, on = numbers["update"]["false"], numbers["update"]["true"]
    assert off["before"] == off["after"] == on["before"] > on["after"]
    assert numbers["update"]["ratio"] == pytest.approx(off["median_s"] / on["median_s"])
    assert set(numbers["imbalance"]["2"]) == set(numbers["planning"]["seconds"]) == set(balance.ASSIGNMENTS)


@pytest.mark.slow
def test_calls_of_a_reward_per_second(tmp_path):
    start().close()  # skips where a layer of the sandbox is missing
    numbers = call("reward", tmp_path / "reward.json", "--calls", "2100", "--isolated", "20")
    sides = {"inline", "workers", "sandbox", "programs", "workers, faults", "plain pool", "server", "plain posts"}
    assert set(numbers["calls_per_s"]) == sides and numbers["server_to_plain_posts"] > 0
    assert all(rate > 0 for rate in numbers["calls_per_s"].values()) and numbers["ratio"]["plain pool"] == 1.0


@pytest.mark.slow
def test_offloaded_reward_models_take_less_memory(tmp_path):
    small = ("--responses", "8", "--length", "8", "--layers", "2")
    numbers = call("reward_models", tmp_path / "models.json", *small)
    sides, sizes = numbers["sides"], numbers["bytes"]
    assert sides["device"]["peak"] > sum(sizes) > sides["disk"]["peak"]
    assert sides["disk"]["after"] < min(sizes) < sides["device"]["after"] and numbers["ratio"]["peak"] < 1


@pytest.mark.slow
def test_startup_alone(tmp_path):
    numbers = call("startup", tmp_path / "startup.json", "--rft-only")
    config, ready, first = numbers["median_s"]["rft"].values()
    assert 0 < config < ready < first
    assert "ratio" not in numbers


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed (extra bench)")
def test_startup_beside_trl(tmp_path):
    numbers = call("startup", tmp_path / "startup.json")
    imported, ready, first = numbers["median_s"]["trl"].values()
    assert 0 < imported < ready < first
    assert set(numbers["ratio"]) == {startup.BEFORE, startup.FIRST}


@pytest.mark.slow
def test_a_checkpoint_is_saved_in_both_ways(tmp_path):
    parser, out = argparse.ArgumentParser(), tmp_path / "checkpoint.json"
    checkpoint.add_options(parser)
    arguments = parser.parse_args(f"--size tiny --repeats 1 --out {out}".split())
    arguments.run(arguments)
    numbers = json.loads(out.read_text())
    for side in checkpoint.SIDES:
        assert numbers["state_mib"] < numbers[side]["files_mib"][0] < 1.5 * numbers["state_mib"] + 1, "all of it"
        assert 0 < numbers[side]["blocking_s"][0] <= numbers[side]["whole_s"][0]
    assert numbers["rft"]["blocking_s"][0] < numbers["rft"]["whole_s"][0]


@pytest.mark.slow
@pytest.mark.parametrize("section", ["load", "sync", "publish"])
def test_a_model_is_read_written_and_synced_in_both_ways(section, tmp_path):
    numbers = call(section, tmp_path / "model.json", "--size", "1m")
    assert numbers["model_mib"] > 4
    for side in model_io.SIDES:
        assert numbers[side]["seconds"][0] > 0 and numbers[side].keys() == {"seconds", "first_mib", "last_mib"}
