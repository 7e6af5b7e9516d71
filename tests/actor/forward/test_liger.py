"""Liger's kernels: where they are refused, and, in Triton's interpreter, what they compute."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rft.errors import Problems
from rft.setup.assembly import Job
from rft.strategy.base import ModelFacts
from tests.actor.lora.adapters import make
from tests.conftest import ENDS_S
from tests.helpers import strategy_options

FOLDER = os.environ.get("RFT_LIGER_DIR", "")


@pytest.fixture
def installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: name if name == "liger_kernel" else find(name, *a))


def test_a_run_without_the_package_names_the_extra(resolved, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "liger_kernel" else find(name, *a))
    with pytest.raises(Problems) as refused:
        Job(resolved("actor.liger=true"))
    assert 'actor.liger=true needs liger_kernel: pip install "rft[liger]"' in str(refused.value)


def test_a_run_on_a_cpu_is_refused_with_the_reason(resolved, installed):
    said = (
        "actor.liger=true: Liger's kernels are written in Triton and need a GPU, and with strategy.device=cpu this "
        "machine computes on its CPU; set actor.liger=false"
    )
    with pytest.raises(Problems) as refused:
        Job(resolved("actor.liger=true", "strategy.device=cpu", "algorithm=ppo"))
    assert said in str(refused.value) and "critic.liger" not in str(refused.value)


def test_a_gpu_is_not_refused(monkeypatch):
    monkeypatch.setattr("rft.strategy.fsdp2_options.device_kind", lambda device: "cuda")
    strategy_options().check({"actor": ModelFacts("lm", liger=True)})


def test_an_actor_on_a_cpu_is_refused_before_its_layers_are_replaced(world, installed):
    with pytest.raises(
        ValueError, match=r"^actor\.liger=true: Liger's kernels .* computes on cpu; set actor\.liger=fa"
    ):
        make(world, liger=True)


@pytest.mark.slow
@pytest.mark.skipif(
    not FOLDER and importlib.util.find_spec("liger_kernel") is None,
    reason="liger_kernel is not installed, and RFT_LIGER_DIR names no folder (.ci/run prepares one)",
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for a CPU")
def test_kernels_in_the_interpreter_of_triton() -> None:
    root, checks = Path(__file__).parents[3], str(Path(__file__).with_name("liger_checks.py"))
    path = os.pathsep.join([str(root), FOLDER])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--show-capture=no", checks],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
