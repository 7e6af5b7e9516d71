"""The section `logprob` of the benchmark: every way computes the same, and its peak is what it allocates."""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from bench import logprob, logprob_side  # noqa: E402

HAS_TRL = importlib.util.find_spec("trl") is not None
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None
TRL = pytest.mark.skipif(not HAS_TRL, reason="trl is not installed (extra bench)")
MARKS = {
    "rft_compiled": [
        pytest.mark.slow,  # compiles for 20 seconds
        pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler"),
    ],
    "trl_fused": TRL,
    "trl_whole": TRL,
    "liger": pytest.mark.skipif(not HAS_LIGER, reason="liger_kernel is not installed (extra liger)"),
}
WAYS = [pytest.param(way, marks=MARKS.get(way, ())) for way in logprob_side.WAYS]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_computes_log_probabilities_and_entropy(way, entropy):
    hidden, weight = torch.randn(16, 8), torch.randn(300, 8)
    targets = torch.randint(300, (16,))
    logprobs, entropies = logprob_side.WAYS[way](hidden, weight, targets, entropy)
    logp = (hidden.double() @ weight.double().T).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), logp[torch.arange(16), targets], rtol=1e-5, atol=1e-5)
    if entropy:
        torch.testing.assert_close(entropies.double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)


def test_the_peak_is_that_of_the_run_and_not_of_what_was_before():
    torch.ones(50_000_000)  # 200 MB that are gone again
    before = logprob_side.forget_peak()
    held = torch.ones(25_000_000)
    assert logprob_side.peak() - before == pytest.approx(held.nbytes, rel=0.1)


def test_bytes_are_counted_with_and_without_what_every_way_needs():
    side = {"first": 9.0, "seconds": [3.0, 2.0], "cpu": [4.0, 5.0], "grown": 100, "inputs": 30, "gradients": 20}
    found = logprob.summary(side)
    assert found == {"first": 9.0, "seconds": 2.0, "cpu": 4.0, "above": 80, "total": 130}


def call(out, *options):
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "logprob", *options, "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(out.read_text())


@pytest.mark.slow
def test_a_small_run(tmp_path):
    size = ("--tokens", "3000", "--vocab", "12000", "--hidden", "8")
    said, numbers = call(tmp_path / "numbers" / "logprob.json", *size, "--rft-only")
    ours, plain = numbers["sides"]["rft"], numbers["sides"]["plain"]
    logits = 4 * 3000 * 12000
    assert 2 * logits < plain["above"] < 4 * logits
    assert ours["above"] < 0.2 * plain["above"]
    assert ours["ratio"]["total"] == ours["total"] / plain["total"] > ours["ratio"]["above"]
    assert ours["gradient_difference"] < 1e-5
    assert set(numbers["sides"]) - {"rft_compiled"} == {"rft", "plain"}
    assert "Liger is left out" in said and "TRL is left out" in said


@pytest.mark.slow
@TRL
def test_a_small_run_beside_trl(tmp_path):
    size = ("--tokens", "64", "--vocab", "500", "--hidden", "8", "--entropy", "--dtype", "bfloat16")
    _, numbers = call(tmp_path / "logprob.json", *size)
    assert set(numbers["sides"]) - {"rft_compiled", "liger"} == {"rft", "plain", "trl_fused", "trl_whole"}
    assert all(side["gradient_difference"] < 0.05 for side in numbers["sides"].values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tokens 0", "--tokens 0: give at least 1"),
        ("--repeats -1", "--repeats -1: give at least 1"),
        ("--tokens 10000000", "--tokens 10000000: the plain way needs 16980.2 GiB for logits"),
    ],
)
def test_wrong_options_are_refused(options, said, tmp_path):
    parser = argparse.ArgumentParser()
    logprob.add_options(parser)
    with pytest.raises(ValueError, match=said):
        logprob.run(parser.parse_args([*options.split(), "--out", str(tmp_path / "x.json")]))
