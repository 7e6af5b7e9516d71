"""The section `rollout` of the benchmark; `.ci/run` runs it in the environment of vLLM too."""

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark  # noqa: E402
from bench import rollout, rollout_side  # noqa: E402
from bench.workload import Workload, skewed  # noqa: E402

HAS_VLLM = bool(list(importlib.metadata.distributions(name=rollout.VLLM)))


class Engine:
    """Samples as many tokens as a request asks for, and `more`."""

    def __init__(self, more):
        self.more = more
        self.version = 0
        self.calls = []

    def wake(self, part):
        self.calls.append(part)

    def update_weights(self, version, tensors):
        self.version = version
        self.calls.append(version)

    def generate(self, requests, sampling, on_completion=None):
        self.calls.append("generate")
        return [
            [argparse.Namespace(tokens=[0] * (limit + self.more)) for limit in request.limits] for request in requests
        ]


def test_an_engine_that_samples_other_lengths_is_refused():
    policy = argparse.Namespace(network=argparse.Namespace(model=argparse.Namespace(parameters=list)), weights=list)
    work = {"prompts": [[3], [4]], "lengths": [[2, 5], [1]], "sampling": None, "repeats": 2}
    engine = Engine(0)
    found = rollout_side.speed(engine, policy, **work)
    assert found["tokens"] == 8
    assert len(found["seconds"]) == len(found["cpu"]) == 2
    assert engine.calls == [x for v in (1, 2, 3) for x in ("weights", v, "kv_cache", "generate")], "as in a step"
    with pytest.raises(AssertionError, match="not as long"):
        rollout_side.speed(Engine(1), policy, **work)


def test_medians_tokens_per_second_and_room_for_the_keys_and_values_of_all_rows():
    side = {"sync_s": [1.0, 5.0, 2.0], "speed": {"x": {"tokens": 60, "seconds": [4.0, 2.0, 3.0], "cpu": [5.0]}}}
    found = rollout.summary(side)
    assert found["median_sync_s"] == 2.0
    assert (found["speed"]["x"]["tokens_per_s"], found["speed"]["x"]["tokens_per_cpu_s"]) == (20.0, 12.0)
    workload = Workload("1m", skewed(16, 200))
    assert rollout.cache_bytes(workload, workload.rows) == (16 * 2 + 1) * 128 * 2 * 4 * 4 * 2 * 32


@pytest.mark.slow
def test_hf_alone_or_beside_vllm(run_script, tmp_path):
    options = ["--size", "1m", "--rows", "8", "--longest", "12", "--repeats", "1", "--eager", "--sizes"]
    assert run_script(benchmark.main, "rollout", *options, "--out", tmp_path / "rollout.json")[0] == 0
    numbers = json.loads((tmp_path / "rollout.json").read_text())
    weights = 4 * numbers["sizes"]["1m"]["parameters"]
    sides = numbers["sizes"]["1m"]["sides"]
    assert set(sides) == {"hf", *(["vllm"] if HAS_VLLM else [])}
    for side in sides.values():
        assert side["speed"]["equal"]["tokens"] == 8 * 12
        assert side["speed"]["skewed"]["tokens"] == sum(map(sum, numbers["workload"]["skewed"]))
    if HAS_VLLM:
        assert sides["vllm"]["held"] > sides["vllm"]["cache"] + weights
